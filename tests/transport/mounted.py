"""A native mount served by another process, for tests: started, watched, always taken down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.rig.mounts import CONTAINERS_END_S, REPOSITORY

WATCHDOG_S = 600.0


class NativeMount:
    """A context manager; `path` is the mount point.

    After WATCHDOG_S the kernel's connection is aborted, so that hanging calls fail.
    """

    def __init__(self, base: Path, *options: str, fd: int = -1, under: Sequence[str] = ()) -> None:
        """`options` and `fd` as `tests.transport.server` has them; `under`: the command that runs
        the server, where one does.
        """
        self.base = base
        self.path = base / "mnt"
        self.backing = base / "backing"
        self.tier = base / "tier"
        self._options = list(options)
        self._fd = fd
        self._under = under
        self.negotiated: dict[str, Any] = {}
        self._process: subprocess.Popen[str] | None = None
        self._watchdog = threading.Timer(WATCHDOG_S, self._abort)

    def __enter__(self) -> NativeMount:
        for directory in (self.backing, self.tier, *([self.path] if self._fd < 0 else [])):
            # with a descriptor the mount point is there, and must not be touched before it is
            # served
            directory.mkdir(exist_ok=directory == self.backing)
        self._watchdog.start()
        try:
            self.negotiated = self.start_server(*self._options)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def start_server(self, *options: str) -> dict[str, Any]:
        """Start a server process; returns what it negotiated."""
        command = [
            *self._under,
            sys.executable,
            "-m",
            "tests.transport.server",
            str(self.backing),
            str(self.tier),
            str(self.path),
            *options,
        ]
        fds = [self._fd] if self._fd >= 0 else []
        if fds:
            command += ["--fd", str(self._fd)]
        with (self.base / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=REPOSITORY, pass_fds=fds
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.log()
        record: dict[str, Any] = json.loads(line)
        return record

    @property
    def pid(self) -> int:
        """The server's, or that of the command it runs under."""
        assert self._process is not None
        return self._process.pid

    def kill_server(self) -> None:
        """kill -9; the mount stays as long as somebody holds the descriptor."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def log(self) -> str:
        """What the servers wrote."""
        return (self.base / "server.log").read_text()

    def unmount(self, *flags: str) -> int:
        return subprocess.run(
            ["umount", *flags, str(self.path)], check=False, timeout=120, capture_output=True
        ).returncode

    def wait_for_server(self) -> int:
        """The server's exit code, once the mount has ended, in all namespaces that have a copy of
        it.
        """
        assert self._process is not None
        return self._process.wait(timeout=CONTAINERS_END_S)

    def _abort(self) -> None:
        self.unmount("-l")
        if self._process is not None:
            self._process.kill()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watchdog.cancel()
        self.unmount("-l")
        if self._process is not None:
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
        if self._fd >= 0:
            os.close(self._fd)
