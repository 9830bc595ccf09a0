"""Keeps processes ready that only have to be told which rank they are.

Where the template fails, ranks are executed instead.
"""

from __future__ import annotations

import array
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import trio

from acpfs.logger import get_logger
from acpfs.training.launcher import ranks, template
from acpfs.training.launcher.node import Executed
from acpfs.training.launcher.options import Options
from acpfs.training.launcher.rank_logs import RankLog

log = get_logger(__name__)
FAILURES_MAX = 3
"""Of spares in a row, before any was ready."""


@dataclass(frozen=True)
class Spare:
    """A process that waits."""

    pid: int
    link: socket.socket


class Forked:
    """Ranks are forked from a template."""

    def __init__(self, options: Options, added: dict[str, str]) -> None:
        """`added`: variables for every rank; what a library reads when it is imported has to be
        there before.
        """
        self._options = options
        self._added = added
        self._executed = Executed(options)
        self._template: socket.socket | None = None
        self._template_pid = 0
        self._ready: deque[Spare] = deque()
        self._news = trio.Event()
        self._failures = 0
        self._gave_up = False
        """Whether no spare could be told what it has to be."""
        self._nursery: trio.Nursery

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until it is cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                for _ in range(self._options.spares):
                    self._ask()
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._end()

    async def begin(self, added: dict[str, str], rank_log: RankLog) -> int:
        self._ask()
        while self._failures < FAILURES_MAX:
            while self._ready:
                spare = self._ready.popleft()
                if self._told(spare, added, rank_log):
                    return spare.pid
                self._ask()
            if self._gave_up:  # no news would come
                break
            if self._news.is_set():
                self._news = trio.Event()
            await self._news.wait()  # several ranks may wait here
        return await self._executed.begin(added, rank_log)

    def ended(self, pid: int) -> None:
        for spare in list(self._ready):
            if spare.pid == pid:
                self._ready.remove(spare)
                spare.link.close()
                log.warning("a spare has ended", pid=pid)
                self._ask()

    # -- asking

    def _ask(self) -> None:
        """Have one more spare made."""
        if self._failures >= FAILURES_MAX:
            return
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setblocking(False)
        for _ in range(2):  # the template may have died
            if self._template is None:
                self._template = self._begin_template()
            try:
                _send(self._template, b"spare", [its.fileno()])
                break
            except OSError:
                self._template.close()
                self._template = None
        its.close()
        self._nursery.start_soon(self._await_ready, own)

    def _begin_template(self) -> socket.socket:
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        python = os.environ.get("PYTHON_EXEC", sys.executable)
        words = [
            python,
            str(Path(template.__file__)),
            str(its.fileno()),
            str(os.getpid()),
            json.dumps(self._options.imports),
        ]
        words.append(str(self._options.spare_bytes))
        with its:
            started = subprocess.Popen(
                words,
                env={
                    **os.environ,
                    **self._added,
                    **({"OMP_NUM_THREADS": "1"} if self._limits_threads else {}),
                },
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[its.fileno()],
            )
        self._template_pid = started.pid
        started.returncode = 0  # it is waited for with all others
        return own

    @property
    def _limits_threads(self) -> bool:
        """As `environment.variables` does."""
        return self._options.per_node > 1 and "OMP_NUM_THREADS" not in os.environ

    async def _await_ready(self, link: socket.socket) -> None:
        await trio.lowlevel.wait_readable(link)
        try:
            data = link.recv(64)
        except OSError:
            data = b""
        if data and not self._gave_up:
            self._failures = 0
            self._ready.append(Spare(int(data), link))
        elif data:
            link.close()  # it ends
        else:
            link.close()
            self._failures += 1
            log.warning("a spare did not become ready", failures=self._failures)
            self._ask()
        self._news.set()

    def _told(self, spare: Spare, added: dict[str, str], rank_log: RankLog) -> bool:
        """Have the spare become a rank. False: it is not there any more."""
        out, err = ranks.opened(rank_log)
        order = {
            "environment": {**os.environ, **added},
            "program": self._options.program,
            "module": self._options.is_module,
            "out": out is not None,
            "err": err is not None,
        }
        try:
            os.kill(spare.pid, 0)
            _send_order(
                spare.link,
                json.dumps(order).encode(),
                [descriptor for descriptor in (out, err) if descriptor is not None],
            )
            return True
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                self._give_up(str(error))
            return False
        finally:
            ranks.close(out, err)
            spare.link.close()

    def _give_up(self, why: str) -> None:
        """The next spare would not be told either: those that are there end, and ranks are
        executed, whose environment may be longer.
        """
        log.error("the environment is too long for a spare: ranks are executed", why=why)
        self._gave_up = True
        self._failures = FAILURES_MAX
        for spare in self._ready:
            spare.link.close()
        self._ready.clear()
        self._news.set()

    def _end(self) -> None:
        for spare in self._ready:
            spare.link.close()
            ranks.signal_rank(spare.pid, signal.SIGKILL)
        if self._template is not None:
            self._template.close()
            ranks.signal_rank(self._template_pid, signal.SIGKILL)


def _send_order(link: socket.socket, data: bytes, descriptors: list[int]) -> None:
    """To a spare.

    Raises:
        OSError: it is gone; EMSGSIZE: it is more than the system, or the spare, takes in one
            message.
    """
    if len(data) > template.MESSAGE_BYTES_MAX:
        raise OSError(errno.EMSGSIZE, f"{len(data)} bytes")
    _send(link, data, descriptors)


def _send(link: socket.socket, data: bytes, descriptors: list[int]) -> None:
    rights = (
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        if descriptors
        else []
    )
    link.sendmsg([data], rights)
