"""The conductor of a job with several nodes: the meeting of its launchers, called again and again; and who starts that.

What was said while nobody was there need not be said again: what a launcher registers with has all of it.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import trio

from acpfs.errors import RefusedError
from acpfs.logger import get_logger
from acpfs.training.boot import JOBS
from acpfs.training.coordinator.launchers import NODE_LOST, NODES_S
from acpfs.training.credentials import NAME as CREDENTIALS
from acpfs.training.credentials import Credentials
from acpfs.training.launcher import ranks
from acpfs.training.launcher.options import Options
from acpfs.training.messages import FromLauncher, Header, Launcher, Over, Sent, ToLauncher
from acpfs.training.records import MalformedError
from acpfs.training.wire import LinkClosedError, TrioLink, notice_silence

log = get_logger(__name__)
REDIAL_S = 0.2
REJOIN_S = 60.0
"""So long ranks go on while nobody conducts."""
FAREWELL_S = 10.0
CONNECT_S = 5.0


class Together:
    """One per launcher."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._host, _, port = options.endpoint.rpartition(":")
        self._port = int(port)
        save = options.save_directory
        self._job_directory = None if save is None else save / JOBS / f"run-{options.run_id}".replace("/", "_")
        self._hear: trio.MemorySendChannel[ToLauncher]
        self._heard: trio.MemoryReceiveChannel[ToLauncher]
        self._hear, self._heard = trio.open_memory_channel(1000)
        self._outbox: trio.MemorySendChannel[FromLauncher] | None = None
        """To the connection that there is."""
        self._introduce: Callable[[str], Launcher]
        self._begun = trio.Event()

    def begin(self, introduce: Callable[[str], Launcher]) -> None:
        self._introduce = introduce
        self._begun.set()

    def tell(self, message: FromLauncher) -> None:
        if self._outbox is not None:
            self._outbox.send_nowait(message)

    async def next(self) -> ToLauncher:
        return await self._heard.receive()

    async def run(self) -> None:
        """Until it is cancelled."""
        await self._begun.wait()
        async with trio.open_nursery() as nursery:
            if self._hosts():
                nursery.start_soon(self._keep_meeting)
            nursery.start_soon(self._keep_calling)

    # -- the meeting's process

    def _hosts(self) -> bool:
        """Whether this node is the one where launchers meet."""
        return self._options.node_rank == 0 if self._options.node_rank is not None else _is_here(self._host)

    async def _keep_meeting(self) -> None:
        """Have it run, whoever kills it. Where two launchers of one host try, one of them has the port."""
        words = [sys.executable, "-m", "acpfs.training.coordinator.meeting", "--job", self._options.run_id]
        words += ["--listen", f"{self._host if _is_here(self._host) else ''}:{self._port}"]
        words += ["--credentials", str(self._job_directory)] if self._job_directory is not None else []
        while True:
            started = subprocess.Popen(  # noqa: ASYNC220  # some milliseconds
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if self._options.node_rank == 0 else subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=ranks.dying_with(os.getpid(), signal.SIGTERM),  # noqa: PLW1509  # the launcher has one thread
            )
            descriptor = os.pidfd_open(started.pid)
            started.returncode = 0  # it is waited for with all others
            try:
                await trio.lowlevel.wait_readable(descriptor)
            except trio.Cancelled:  # it ends by itself when all launchers have heard
                with trio.move_on_after(FAREWELL_S, shield=True):
                    await trio.lowlevel.wait_readable(descriptor)
                ranks.signal_rank(started.pid, signal.SIGKILL)
                raise
            finally:
                os.close(descriptor)
            await trio.sleep(REDIAL_S)

    # -- calling it

    async def _keep_calling(self) -> None:
        alone_since, patience = trio.current_time(), NODES_S
        while trio.current_time() < alone_since + patience:
            link: TrioLink | None = None
            try:
                with trio.fail_after(CONNECT_S):
                    stream = await trio.open_tcp_stream(self._host.strip("[]"), self._port)
                    host = str(stream.socket.getsockname()[0])
                    notice_silence(stream.socket)
                    link = TrioLink(await self._secured(stream))
                await self._talk(link, host)
            except (OSError, RefusedError, trio.BrokenResourceError, trio.TooSlowError) as error:
                log.info("nobody conducts", error=str(error))
            if link is not None:
                await link.close()
                alone_since, patience = trio.current_time(), REJOIN_S
            await trio.sleep(REDIAL_S)
        await self._hear.send(Over(NODE_LOST, f"nobody conducts at {self._options.endpoint} for {patience:g} s"))

    async def _talk(self, link: TrioLink, host: str) -> None:
        """Until the connection ends."""
        self._outbox, waiting = trio.open_memory_channel[FromLauncher](math.inf)
        try:
            await link.send(self._sent(self._introduce(host)))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_all, link, waiting)
                try:
                    while isinstance(message := (await link.receive()).message, ToLauncher):
                        await self._hear.send(message)
                except (LinkClosedError, MalformedError) as error:
                    log.warning("the meeting of launchers is gone", error=str(error))
                nursery.cancel_scope.cancel()
        finally:
            self._outbox = None
            await link.close()  # the meeting ends when nobody is connected any more, and its host waits for it

    async def _send_all(self, link: TrioLink, waiting: trio.MemoryReceiveChannel[FromLauncher]) -> None:
        with contextlib.suppress(LinkClosedError):  # who receives is told as well
            async for message in waiting:
                await link.send(self._sent(message))

    def _sent(self, message: FromLauncher) -> Sent:
        return Sent(Header(self._options.run_id, 0, 0, "launcher"), message)

    async def _secured(self, stream: trio.SocketStream) -> trio.abc.Stream:
        """TLS over it, where there is a directory for the certificate."""
        if self._job_directory is None:
            return stream
        found = Credentials(self._job_directory / CREDENTIALS)
        if not (found.directory / "certificate.pem").exists():
            raise RefusedError(f"{found.directory} is not there yet")
        secured = trio.SSLStream(stream, found.calling, https_compatible=True)
        await secured.do_handshake()
        if not found.vouch_for(secured.getpeercert(True)):
            raise RefusedError("another certificate than the job's")
        return secured


def _is_here(host: str) -> bool:
    """Whether one can listen there."""
    with contextlib.suppress(OSError):
        for family, kind, number, _, address in socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, number) as probe:
                probe.bind(address)
                return True
    return False
