"""The HTTP server of the metrics: imported where they are served, and most mounts have none."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Who scrapes is no news."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """A thread per scrape, at a socket that others have bound: it may be an earlier worker's."""

    daemon_threads = True

    def __init__(self, listening: socket.socket, app: Callable[..., Iterable[bytes]]) -> None:
        where: tuple[str, int] = listening.getsockname()[:2]
        super().__init__(where, _SilentHandler, bind_and_activate=False)
        self.socket.close()  # made by the base class, and not bound
        self.socket = listening.dup()
        self.server_name, self.server_port = where  # as `server_bind` sets them
        self.setup_environ()
        self.set_app(app)
