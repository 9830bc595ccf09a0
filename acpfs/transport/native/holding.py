"""Holding writers of the passthrough lane: the thread that looks when to, and the process that takes inode locks.

Implements `filesystem.hold.Holder`. Recognises the calls by which its process takes locks: a SETATTR that changes nothing, from one of
that process's threads. The process is started when it is first needed and ends with the thread that started it. `take` and `look_soon`
are called under the file system's lock and only leave a note; the rest is the thread's own.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

from acpfs.filesystem.filesystem import FileSystem
from acpfs.logger import get_logger
from acpfs.transport.native import hold_process
from acpfs.types import Ino

END_WAIT_S = 2.0

log = get_logger(__name__)


class Holding:
    """Holds files, for one session."""

    def __init__(self, fs: FileSystem) -> None:
        """Starts nothing; `start` does."""
        self._fs = fs
        self._mountpoint = os.fspath(fs.settings.mountpoint)
        self._wanted: deque[Ino] = deque()
        self._noted = threading.Event()
        self._stopping = False
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, name="fuse-hold", daemon=True)

    # -- Holder

    def take(self, ino: Ino) -> None:
        """See `Holder`."""
        self._wanted.append(ino)
        self._noted.set()

    def look_soon(self) -> None:
        """See `Holder`."""
        self._noted.set()

    # -- life

    def start(self) -> None:
        """Begin to look; needs passthrough, and the mount."""
        with self._fs.lock:
            self._fs.hold.offer(self)
        self._thread.start()

    def stop(self) -> None:
        """The session has ended."""
        with self._fs.lock:
            self._fs.hold.offer(None)
        self._stopping = True
        self._noted.set()
        if self._thread.is_alive():
            self._thread.join(END_WAIT_S)

    def is_ours(self, pid: int) -> bool:
        """Whether a thread belongs to the process that takes locks."""
        process = self._process
        return process is not None and pid != 0 and os.path.exists(f"/proc/{process.pid}/task/{pid}")

    # -- the thread

    def _run(self) -> None:
        wait_s: float = math.inf
        while not self._stopping:
            self._noted.wait(None if math.isinf(wait_s) else wait_s)
            self._noted.clear()
            try:
                wait_s = self._look()
            except Exception:
                log.exception("looking after passthrough writers failed")
                wait_s = 1.0
        self._end_process()

    def _look(self) -> float:
        with self._fs.lock:
            wait_s = self._fs.tick()
        if self._process is None and not math.isinf(wait_s):
            self._process = self._start_process()  # with the first writer: it takes 50 ms, in which a writer fills 300 MiB
        while self._wanted:
            self._tell(self._wanted.popleft())
        return wait_s

    def _tell(self, ino: Ino) -> None:
        """Make the process take the lock of a file."""
        for _attempt in range(2):
            process = self._process
            if process is None or process.poll() is not None:
                process = self._process = self._start_process()
            assert process.stdin is not None
            try:
                process.stdin.write(f"{ino}\n")
                process.stdin.flush()
            except BrokenPipeError:
                self._end_process()
                continue
            return

    def _start_process(self) -> subprocess.Popen[str]:
        """From this thread: the process gets its death signal when the thread that started it ends."""
        program = Path(hold_process.__file__)
        command = [sys.executable, "-I", "-S", os.fspath(program), self._mountpoint]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd="/")

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
                assert process.stdin is not None
                process.stdin.close()
                process.wait(END_WAIT_S)
