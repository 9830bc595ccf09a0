"""Has the kernel write back what was changed through mappings, so that the daemon knows of it.

By a process of its own for each time (`mapped_pages_process`), as nothing that serves the mount may wait for it. That
process may not end: the kernel waits for the answer to each page, which a worker that hangs, or RAM without room,
holds up. Who asked goes when its time is up, the process is killed, and a thread stays until it is gone; so there are
few of them. Not thread-safe but for the threads that it starts.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from acpfs.logger import get_logger
from acpfs.runtime.threads import Threads
from acpfs.types import Ino
from acpfs.worker import mapped_pages_process

PROCESSES_MAX = 4
"""Also those that were killed and have not ended."""

log = get_logger(__name__)


class _Process:
    """One of them; `run` in a thread, `give_up` in any."""

    def __init__(self, asked: bytes) -> None:
        self._asked = asked
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_given_up = False

    def run(self) -> bytes:
        """What it says; waits until it has ended, even if that is for ever.

        Raises:
            OSError: the machine has no process left.
        """
        command = [sys.executable, "-I", "-S", os.fspath(Path(mapped_pages_process.__file__))]
        with self._lock:
            if self._is_given_up:
                return b""
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/"
            )
            self._child = child
        with child:
            said, _nothing = child.communicate(self._asked)
        return said

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            self._is_given_up = True
            if self._child is not None:
                self._child.kill()  # nothing, where it has ended


class MappedPages:
    """Of one mount."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0

    async def write_back(
        self, mountpoint: Path, files: Mapping[Ino, bytes], threads: Threads
    ) -> dict[Ino, int]:
        """Return when the kernel has sent all that was changed until now in these files, which are told by their paths.

        Those with which it was in vain, and why: an errno. May take as long as its caller has patience.
        """
        told = [[ino, os.fsdecode(path)] for ino, path in files.items()]
        process = _Process(json.dumps({"mountpoint": str(mountpoint), "files": told}).encode())
        try:
            said = await threads.run_sync(self._run, process, abandon_on_cancel=True)
            return {Ino(ino): int(number) for ino, number in json.loads(said)}
        except (OSError, ValueError) as error:
            log.warning("what was changed through mappings is not known", error=str(error))
            return dict.fromkeys(files, getattr(error, "errno", None) or errno.EIO)
        finally:
            process.give_up()

    def _run(self, process: _Process) -> bytes:
        with self._lock:
            if self._running == PROCESSES_MAX:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            self._running += 1
        try:
            return process.run()
        finally:
            with self._lock:
                self._running -= 1
