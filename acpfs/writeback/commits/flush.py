"""The end of a commit group: directories get their times and are flushed, all at once on threads of
their own.

What is visible becomes persisted here. A flush that fails is repeated for ever, each time after a
look whether what it flushes is still there. Only what cannot be reached any more (a mode, an
expired ticket, something else in the place of a directory above it) is not waited for: whatever
would let it be reached again may stand behind this group in the log. One flush of file systems
stands for all of it. Times that such a directory was to get come after a later group, as long as
this worker lives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Any

import trio

from acpfs.backing.lower import UNREACHABLE, LowerPath
from acpfs.errors import errno_name
from acpfs.logger import get_logger, shown
from acpfs.types import ROOT, Ino
from acpfs.writeback.arrival import outcome
from acpfs.writeback.commits.group import GroupOutcome
from acpfs.writeback.evidence import absence
from acpfs.writeback.failures.retry import PERMANENT_TRIES, RetryPolicy
from acpfs.writeback.parts import DrainParts

_UNREACHED_PER_GROUP = 16
"""As many as the pool has threads: a whole tree that is out of reach costs a group no more than one
call's time.
"""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Task:
    ino: Ino
    path: LowerPath
    times: tuple[int, int] | None
    is_directory: bool


@dataclass(slots=True)
class Tries:
    """Of one group."""

    count: int = 0


class Flusher:
    """Flushes what commit groups touched."""

    def __init__(
        self, parts: DrainParts, retry: RetryPolicy, recheck: Callable[[GroupOutcome], None]
    ) -> None:
        """`recheck`: looks whether what is to be flushed is still there, see `Recheck.look`."""
        self._parts = parts
        self._retry = retry
        self._recheck = recheck
        self._lower = parts.lower
        self._tree = parts.tree
        self._log = parts.log
        self._pool = parts.calls.syncs
        self._untimed: dict[Ino, bool] = {}
        """And whether it was out of reach: others may have changed it since, so the mount is not to
        take it for what it left there.
        """
        self._unreached: dict[Ino, None] = {}
        """Directories that could not be given their times, those tried last at the end."""

    def take_untimed(self) -> GroupOutcome:
        """Directories that still have to get their times: their last operation was left out, or
        they were out of reach.
        """
        group = GroupOutcome()
        for ino in [ino for ino in self._untimed if not self._log.pending_in(ino)]:
            group.directories[ino] = 0
            if self._untimed.pop(ino):
                group.synced[ino] = None
        return group

    async def flush(self, group: GroupOutcome) -> None:
        """Return when everything in the group is on stable storage."""
        with self._parts.lock:
            tasks = self._tasks(group)
            all_tasks = tasks
        if group.done:
            for ino in list(islice(self._unreached, _UNREACHED_PER_GROUP)):
                del self._unreached[ino]
                self._untimed[ino] = True
        tries = Tries()
        refusals: Counter[_Task] = Counter()
        # An earlier worker's flush failed, and this one's may succeed with a server that has
        # forgotten.
        is_known = not group.is_doubtful or await self._look(group, tasks, tries)
        while tasks or not is_known:
            failed, error = await self._attempt(tasks, group, refusals)
            group.unflushed = {task.ino for task in failed}
            group.made_again = False
            tasks = failed
            if error is not None:
                await self._stand_back(group, error, tries)
            if error is not None or not is_known:
                is_known = await self._look(group, failed, tries)
                tasks = self._again(group, all_tasks)

    def _again(self, group: GroupOutcome, all_tasks: list[_Task]) -> list[_Task]:
        """What was made again is flushed again, wherever it is, and with what is above it."""
        if group.made_again:
            with self._parts.lock:
                known = {task.ino for task in all_tasks}
                all_tasks += [task for task in self._tasks(group) if task.ino not in known]
            return all_tasks
        return [task for task in all_tasks if task.ino in group.unflushed]

    async def _look(self, group: GroupOutcome, failed: list[_Task], tries: Tries) -> bool:
        """Whether it is known what there is; else some of it, and the rest is looked at again after
        the next flush.
        """
        group.unflushed |= {task.ino for task in failed}
        error = await self._error(self._pool.submit("recheck", self._recheck, group))
        if error is not None:
            await self._stand_back(group, error, tries)
        return error is None

    async def _stand_back(self, group: GroupOutcome, error: OSError, tries: Tries) -> None:
        tries.count += 1
        self._note(group, error)
        await trio.sleep(self._retry.delay_s(tries.count))

    def _note(self, group: GroupOutcome, error: OSError) -> None:
        """In the state, too: a next worker has to look what there is before its own flush says
        anything.
        """
        with self._parts.lock, self._parts.state.step():
            self._parts.counters.retries += 1
            for op, _stat in group.done:
                op.tries = op.tries + 1
                op.last_error = error.errno
                op.last_detail = error.strerror or str(error)
                self._log.save(op)

    async def _attempt(
        self, tasks: list[_Task], group: GroupOutcome, refusals: Counter[_Task]
    ) -> tuple[list[_Task], OSError | None]:
        """Those that failed, and why. `refusals`: how often in a row each could not be reached."""
        futures = [self._pool.submit("flush", self._carry_out, task, group) for task in tasks]
        errors = {
            task: await self._error(future) for task, future in zip(tasks, futures, strict=True)
        }
        for task, error in errors.items():
            refusals[task] = (
                refusals[task] + 1 if error is not None and error.errno in UNREACHABLE else 0
            )
        left = [task for task in tasks if refusals[task] >= (PERMANENT_TRIES if group.done else 1)]
        if left and group.done:  # else only times were to come
            refused = await self._error(
                self._pool.submit(
                    "flush", self._lower.sync_file_systems, [task.path for task in left]
                )
            )
            if refused is not None:
                return [task for task in tasks if errors[task] is not None], refused
        for task in left:
            error = errors.pop(task)
            if task.times is not None:
                self._unreached[task.ino] = None
            if error is not None and group.done:
                path = shown(b"/".join(task.path))
                why = errno_name(error.errno)
                _log.error(
                    "cannot be reached any more: flushed with its file system", path=path, error=why
                )
        failed = {task: error for task, error in errors.items() if error is not None}
        return list(failed), next(iter(failed.values()), None)

    @staticmethod
    async def _error(future: Future[Any]) -> OSError | None:
        try:
            await outcome(future)
        except OSError as error:
            return error
        return None

    def _carry_out(self, task: _Task, group: GroupOutcome) -> None:
        try:
            if task.times is not None:
                self._lower.set_times(task.path, *task.times)
            if task.is_directory:
                self._lower.sync_directory(task.path)
            else:
                self._lower.sync_entry(task.path)
            if task.times is not None and (group.done or task.ino not in group.synced):
                group.settled.append((task.ino, self._lower.lstat(task.path)))
        except FileNotFoundError:
            absence.make_sure(
                self._lower, task.path
            )  # removed from outside: there is nothing to flush

    def _tasks(self, group: GroupOutcome) -> list[_Task]:
        tasks = []
        for ino in {**group.directories, **group.synced}:
            path = self._tree.path(ino)
            if path is not None:
                tasks.append(_Task(ino, path, self._times(ino, group), is_directory=True))
        for ino in group.entries:
            path = self._tree.path(ino)
            if path is not None and ino != ROOT:
                tasks.append(_Task(ino, path, None, is_directory=False))
        return tasks

    def _times(self, ino: Ino, group: GroupOutcome) -> tuple[int, int] | None:
        """Only with the directory's last operation: any later one would change them again."""
        if self._log.pending_in(ino) != group.directories.get(ino, 0):
            self._untimed.setdefault(ino, False)
            return None
        self._untimed.pop(ino, None)
        return self._parts.listener.directory_times(ino)
