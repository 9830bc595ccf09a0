"""A launcher's life: it does what the conductor says (`Start`, `Replace`, `StopRanks`, `Over`), and
tells how its ranks end.

The conductor is `coordinator.launchers`: in this process where the job has one node, else in the
coordinator. One trio program, one thread.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import trio

from acpfs.logger import get_logger
from acpfs.training.coordinator.exiting import POLL_S, status_of_exiting
from acpfs.training.coordinator.launchers import NODE_LOST, exit_status, told
from acpfs.training.first_update import VARIABLE, Listener
from acpfs.training.launcher import ranks
from acpfs.training.launcher.environment import Seat, job_name, variables
from acpfs.training.launcher.options import Options, accelerators
from acpfs.training.launcher.rank_logs import RankLog, RankLogs, Shown
from acpfs.training.launcher.ranks import RankProcess
from acpfs.training.messages import (
    Exited,
    ExitStatus,
    FromLauncher,
    Idle,
    Launcher,
    Over,
    Planned,
    Replace,
    Start,
    StopRanks,
    ToLauncher,
)

log = get_logger(__name__)
SHOW_EVERY_S = 0.1
NOT_STARTED = 127
"""What shells say of a program that is not there."""


class Conductor(Protocol):
    """Whoever decides."""

    def begin(self, introduce: Callable[[str], Launcher]) -> None:
        """`introduce`: what this launcher registers with, given how other nodes reach it."""

    def tell(self, message: FromLauncher) -> None:
        """Never waits."""

    async def next(self) -> ToLauncher: ...


class Beginner(Protocol):
    """Makes processes."""

    async def begin(self, added: dict[str, str], rank_log: RankLog) -> int:
        """Of a rank; its pid."""

    def ended(self, pid: int) -> None:
        """A child was waited for that is no rank."""


class Executed:
    """Each rank executes the program anew."""

    def __init__(self, options: Options) -> None:
        self._command = ranks.command_of(options)

    async def begin(self, added: dict[str, str], rank_log: RankLog) -> int:
        return ranks.begin(self._command, added, rank_log)

    def ended(self, pid: int) -> None:
        """Of no interest."""


class Node:
    """One per launcher."""

    def __init__(
        self,
        options: Options,
        conductor: Conductor,
        beginner: Beginner,
        logs: RankLogs,
        added: dict[str, str],
        updates: Listener,
    ) -> None:
        """`added`: variables for every rank, beside torchrun's.

        `updates`: where ranks say that they have done one.
        """
        self._options = options
        self._conductor = conductor
        self._beginner = beginner
        self._logs = logs
        self._added = {**added, VARIABLE: updates.name}
        self._updates = updates
        self._running: dict[int, RankProcess] = {}
        """By pid."""
        self._updated: set[int] = set()
        """Those of them that have done an update."""
        self._exiting: dict[int, RankProcess] = {}
        """Those that the kernel ends, and that were told of already."""
        self._beginning: set[trio.CancelScope] = set()
        """Of ranks that have no process yet."""
        self._start: Start | None = None
        self._replaced = 0
        self._ended: dict[int, int] = {}
        self._stopping = False
        self._planned = False
        self._first_failure: tuple[RankProcess, int] | None = None
        self._over: Over | None = None
        self._name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._nobody_runs = trio.Event()
        self._nursery: trio.Nursery

    async def run(self) -> int:
        """Until the job is over; the exit status."""
        with trio.open_signal_receiver(*self._options.signals, signal.SIGCHLD) as signals:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._take_signals, signals)
                self._nursery.start_soon(self._show)
                self._nursery.start_soon(self._hear_of_updates)
                if self._options.replaces and not accelerators():
                    self._nursery.start_soon(self._see_exiting)
                self._conductor.begin(self.introduction)
                while self._over is None:
                    await self._obey(await self._conductor.next())
                self._nursery.cancel_scope.cancel()
        self._say_why(self._over)
        return self._over.status

    def introduction(self, host: str) -> Launcher:
        """All that a conductor needs. `host`: how other nodes reach this one."""
        options = self._options
        return Launcher(
            *(
                self._name,
                socket.gethostname(),
                host,
                free_port(),
                options.per_node,
                options.node_rank,
            ),
            nodes_min=options.nodes_min,
            nodes_max=options.nodes_max,
            restarts_max=options.restarts_max,
            replaces=options.replaces,
            start=self._start,
            replaced=self._replaced,
            ended=dict(self._ended),
            stopping=self._stopping,
            planned=self._planned,
        )

    # -- what the conductor says

    async def _obey(self, message: ToLauncher) -> None:
        if isinstance(message, Start):
            log.info(
                "ranks start",
                first=message.first_rank,
                world=message.world,
                attempt=message.attempt,
            )
            self._dismiss_coordinators()
            self._start = message
            self._ended = {}
            self._stopping = False
            self._first_failure = None
            self._nobody_runs = trio.Event()
            self._replaced = max(self._replaced, message.generation)
            for local_rank in range(self._options.per_node):
                self._begin_soon(
                    Seat(message.first_rank + local_rank, local_rank, message.generation)
                )
        elif isinstance(message, Replace) and self._start is not None and not self._stopping:
            log.warning("a rank is replaced", rank=message.rank, generation=message.generation)
            self._replaced = max(self._replaced, message.generation)
            self._ended.pop(message.rank, None)
            self._begin_soon(
                Seat(message.rank, message.rank - self._start.first_rank, message.generation)
            )
        elif isinstance(message, StopRanks):
            self._stop(message.why)
        elif isinstance(message, Over):
            await self._end(message)

    def _begin_soon(self, seat: Seat) -> None:
        scope = trio.CancelScope()
        self._beginning.add(scope)
        self._nursery.start_soon(self._begin, seat, scope)

    async def _begin(self, seat: Seat, scope: trio.CancelScope) -> None:
        assert self._start is not None
        rank_log = self._logs.of(self._start.attempt, seat.local_rank, seat.generation)
        added = {
            **self._added,
            **variables(self._options, self._start, seat, rank_log.error_file, os.environ),
        }
        status: int | None = None
        with scope:
            try:
                await trio.lowlevel.checkpoint_if_cancelled()
                pid = await self._beginner.begin(added, rank_log)
                self._running[pid] = RankProcess(
                    seat, pid, rank_log, Shown(rank_log, self._options.role, seat.local_rank)
                )
                if self._stopping:
                    ranks.signal_rank(pid, signal.SIGTERM)
            except OSError as error:
                sys.stderr.write(f"acpfs-run: rank {seat.rank} cannot be started: {error}\n")
                status = NOT_STARTED << 8
        self._beginning.discard(scope)
        if scope.cancelled_caught:
            status = int(signal.SIGTERM)
        if status is not None:
            self._tell_end(seat.rank, status)

    def _stop(self, why: str) -> None:
        if self._stopping:
            return
        self._stopping = True
        for scope in self._beginning:
            scope.cancel()
        if self._running or self._beginning:
            log.warning("ranks are stopped", why=why, count=len(self._running))
            for pid in self._running:
                ranks.signal_rank(pid, signal.SIGTERM)
            self._nursery.start_soon(self._kill_late, self._start)
        else:
            self._idle()

    async def _kill_late(self, start: Start | None) -> None:
        await trio.sleep(self._options.stop_s)
        if self._start is start and self._stopping:
            self._kill()

    def _kill(self) -> None:
        for pid in self._running:
            ranks.signal_session(pid, signal.SIGKILL)

    async def _end(self, over: Over) -> None:
        """Nobody is left behind, whatever the conductor thinks."""
        self._stop("the job is over")
        if self._running or self._beginning:
            await self._nobody_runs.wait()
        self._dismiss_coordinators()
        if over.status == NODE_LOST and ExitStatus.SAVED << 8 in self._ended.values():
            over = Over(
                int(ExitStatus.SAVED), over.text
            )  # what the ranks here have saved is there, whoever is gone
        self._over = over

    def _dismiss_coordinators(self) -> None:
        """Of the attempt that is over."""
        if self._start is not None:
            ranks.dismiss_coordinators(job_name(self._options, self._start))

    # -- what happens here

    async def _take_signals(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            if number == signal.SIGCHLD:
                self._note_updates()  # while those who said so can be told by their pids
                for pid, status in ranks.reaped():
                    self._has_ended(pid, status)
            elif not self._planned:
                log.warning(
                    "asked to end",
                    signal=signal.Signals(number).name,
                    deadline_s=self._options.stop_s,
                )
                self._planned = True
                self._conductor.tell(Planned())
            elif number == signal.SIGINT:  # whoever asks twice does not want to wait
                self._kill()

    def _has_ended(self, pid: int, status: int) -> None:
        if pid in self._exiting:
            self._exiting.pop(pid).shown.look(last=True)
            return
        ended = self._running.pop(pid, None)
        if ended is None:
            self._beginner.ended(pid)
            return
        ended.shown.look(last=True)
        self._tell_that_it_ended(ended, status)

    async def _see_exiting(self) -> None:
        """Who can be waited for has given its memory back, which takes 0.6 s per GiB: another
        process need not wait for that.

        Not on an accelerator, whose memory is not there twice.
        """
        while True:
            await trio.sleep(POLL_S)
            for pid, running in list(self._running.items()):
                status = 0
                with contextlib.suppress(OSError):  # it can be waited for
                    status = status_of_exiting(pid)
                if status and not self._stopping:
                    self._note_updates()
                    self._exiting[pid] = self._running.pop(pid)
                    self._tell_that_it_ended(running, status)

    async def _hear_of_updates(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._updates.socket)
            self._note_updates()

    def _note_updates(self) -> None:
        self._updated |= self._updates.heard() & self._running.keys()

    def _tell_that_it_ended(self, ended: RankProcess, status: int) -> None:
        updated = ended.pid in self._updated
        self._updated.discard(ended.pid)
        if status:
            log.warning("a rank has ended", rank=ended.seat.rank, status=told(status))
            if self._first_failure is None or not self._stopping:
                self._first_failure = (ended, status)
        self._tell_end(ended.seat.rank, status, updated=updated)

    def _tell_end(self, rank: int, status: int, *, updated: bool = False) -> None:
        self._ended[rank] = status
        self._conductor.tell(Exited(rank, status, updated))
        if self._stopping and not self._running and not self._beginning:
            self._nobody_runs.set()
            self._idle()

    def _idle(self) -> None:
        self._conductor.tell(Idle(free_port()))

    async def _show(self) -> None:
        while True:
            for running in self._running.values():
                running.shown.look()
            await trio.sleep(SHOW_EVERY_S)

    def _say_why(self, over: Over) -> None:
        if over.status == 0:
            return
        lines = [f"acpfs-run: status {over.status}: {over.text}"]
        if self._first_failure is not None:
            ended, status = self._first_failure
            lines.append(
                f"acpfs-run: rank {ended.seat.rank} of this node {told(status)} "
                f"({exit_status(status)}); {ended.log.directory}"
            )
            lines += [f"    {line}" for line in ended.log.last_lines()]
        with contextlib.suppress(OSError):
            sys.stderr.write("\n".join(lines) + "\n")
            sys.stderr.flush()


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
