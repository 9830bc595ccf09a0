"""Has the kernel write back what was changed through mappings, so that the daemon knows of it.

By a process of its own for each look (`mapped_pages_process`), as nothing that serves the mount may
wait for it. That process may not end: the kernel waits for the answer to each page, which a worker
that hangs, or RAM without room, holds up. Who asked goes when his time is up; a look that nobody
waits for is killed, and a thread stays until it is gone. So there are few of them, and whoever asks
beyond that stands in a queue.

Who asks for the same files shares a look, if it began after the question: an earlier one may have
passed a page before that was changed. Nobody shares a look at more than he asked for, as the rest
of it may not come to its end. Thread-safe.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from acpfs.errors import wanted
from acpfs.filesystem.steps import settled
from acpfs.logger import get_logger
from acpfs.runtime.threads import Event, Threads
from acpfs.types import Ino
from acpfs.worker import mapped_pages_process

PROCESSES_MAX = 4
"""Also those that were killed and have not ended."""
AGAIN_S = 0.2
"""Between two tries to start one where the machine has no process, memory or descriptor left."""

log = get_logger(__name__)


class _Process:
    """One of them; `run` in a thread, `give_up` in any."""

    def __init__(self, asked: bytes, given_up: Event) -> None:
        self._asked = asked
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._given_up = given_up

    def run(self) -> bytes:
        """What it says; waits until it has ended, even if that is for ever.

        Raises:
            OSError: it cannot be started, and not because the machine lacks something.
        """
        while (child := self._started()) is None:
            if self._given_up.wait(AGAIN_S):
                return b""
        with self._lock:  # whoever gives it up now finds it, or was before
            self._child = child
            if self._given_up.is_set():
                child.kill()
        with child:
            said, _nothing = child.communicate(self._asked)
        return said

    @staticmethod
    def _started() -> subprocess.Popen[bytes] | None:
        """None: the machine lacks something for it."""
        command = [sys.executable, "-I", "-S", os.fspath(Path(mapped_pages_process.__file__))]
        try:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/")
        except OSError as error:
            if error.errno == errno.EAGAIN or wanted(error):  # of processes, that is
                return None
            raise

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            self._given_up.set()
            if self._child is not None:
                self._child.kill()  # nothing, where it has ended


class _Look:
    """At some files, for all who asked for just these before it began."""

    def __init__(
        self, files: Mapping[Ino, bytes], mountpoint: Path, running: set[_Look], given_up: Event
    ) -> None:
        self.files = frozenset(files.items())
        self.askers = 0
        # They would not come further than such a one: where its files hold it up, one process waits
        # for them, and not all that there may be. Not for those that begin later: they may be many.
        self.waits_for = {one for one in running if one.files <= self.files}
        self.done = Future[bytes]()
        told = [[ino, os.fsdecode(path)] for ino, path in files.items()]
        asked = json.dumps({"mountpoint": str(mountpoint), "files": told}).encode()
        self.process = _Process(asked, given_up)


class MappedPages:
    """Of one mount."""

    def __init__(self, mountpoint: Path, threads: Threads) -> None:
        self._mountpoint = mountpoint
        self._threads = threads
        self._lock = threading.Lock()
        self._queue: list[_Look] = []
        """Those that have not begun, in the order in which they were asked for."""
        self._running = set[_Look]()

    async def write_back(self, files: Mapping[Ino, bytes]) -> dict[Ino, int]:
        """Return when the kernel has sent all that was changed until now in these files, which are
        told by their paths.

        Those with which it was in vain, and why: an errno. May take as long as its caller has
        patience.
        """
        look = self._asked(files)
        try:
            await settled(look.done)
            said = look.done.result()
            return {Ino(ino): int(number) for ino, number in json.loads(said)}
        except (OSError, ValueError) as error:
            log.warning("what was changed through mappings is not known", error=str(error))
            return dict.fromkeys(files, getattr(error, "errno", None) or errno.EIO)
        finally:
            self._left(look)

    def _asked(self, files: Mapping[Ino, bytes]) -> _Look:
        wanted = frozenset(files.items())
        with self._lock:
            look = next((one for one in self._queue if one.files == wanted), None)
            if look is None:
                look = _Look(files, self._mountpoint, self._running, self._threads.event())
                self._queue.append(look)
            look.askers += 1
            self._begin()
        return look

    def _left(self, look: _Look) -> None:
        with self._lock:
            look.askers -= 1
            if look.askers:
                return
            if look in self._queue:
                self._queue.remove(look)
        look.process.give_up()  # nothing, where it has ended

    def _begin(self) -> None:
        """Under the lock: begin what may, in its order."""
        for look in list(self._queue):
            if len(self._running) == PROCESSES_MAX:
                return
            if look.waits_for.isdisjoint(self._running):
                look.waits_for.clear()  # else all that there ever were hang together
                self._queue.remove(look)
                self._running.add(look)
                self._threads.start("mapped-pages", self._run, look)

    def _run(self, look: _Look) -> None:
        said = b""
        failed: Exception | None = None
        try:
            said = look.process.run()
        except Exception as error:  # noqa: BLE001 - raised where it was asked for
            failed = error
        with self._lock:
            self._running.remove(look)
            self._begin()
        if failed is None:
            look.done.set_result(said)
        else:
            look.done.set_exception(failed)
