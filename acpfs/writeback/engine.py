"""The write-back engine: runs the operation log against the backing directory.

Three tasks in one nursery: streams are started ahead in parallel (one thread each), commits are
carried out group by group in log order (one thread), the manifest is written behind them. All state
is under the file system's lock and every locked section is one transaction; nothing that may block
on the backing directory happens under it or in the trio thread. A failure is state of its operation
(`retry`), an exception that is not an `OSError` is a bug and ends the worker. Knows no FUSE, no
handles, and names only through `Listener`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import trio

from acpfs.backing.lower import ASIDE_PREFIX
from acpfs.checkpoints import Checkpoints
from acpfs.errors import FULL_ERRNOS, errno_name
from acpfs.logger import get_logger
from acpfs.types import Ino, Seq
from acpfs.writeback.arrival import Bell, outcome
from acpfs.writeback.commits.commit import Committer
from acpfs.writeback.commits.conflicts import EVERYTHING, Conflicts, Guarding
from acpfs.writeback.commits.flush import Flusher
from acpfs.writeback.commits.garbage import Garbage
from acpfs.writeback.commits.group import GroupOutcome
from acpfs.writeback.commits.placing import Placing
from acpfs.writeback.commits.recheck import Recheck
from acpfs.writeback.engine_records import QUEUE_ENTRIES_MAX, EngineStatistics
from acpfs.writeback.evidence.whereabouts import Whereabouts
from acpfs.writeback.failures.failures import Failures
from acpfs.writeback.failures.retry import RetryPolicy
from acpfs.writeback.guard.guard import Guard
from acpfs.writeback.log.dependents import with_dependents
from acpfs.writeback.log.log import REMOVING
from acpfs.writeback.log.ops import ATTRIBUTES, Op, OpKind, VersionState
from acpfs.writeback.log.stages import Stage, Step
from acpfs.writeback.manifest.manifest import Manifest
from acpfs.writeback.manifest.manifest_writer import ManifestWriter
from acpfs.writeback.members.gate import Gate
from acpfs.writeback.members.placed import Placed
from acpfs.writeback.members.pointers import Pointers
from acpfs.writeback.members.scopes import Scopes
from acpfs.writeback.order.order import Order
from acpfs.writeback.parts import DrainParts
from acpfs.writeback.report import queue_entries
from acpfs.writeback.sources.source import AbandonedError
from acpfs.writeback.sources.spill import Spill
from acpfs.writeback.streams.checksums import WaitingChecksums
from acpfs.writeback.streams.courtesy import Courtesy
from acpfs.writeback.streams.equal import EqualFiles
from acpfs.writeback.streams.give_way import GiveWay
from acpfs.writeback.streams.scheduler import Scheduler
from acpfs.writeback.streams.spares import Spares
from acpfs.writeback.streams.staged import Staged
from acpfs.writeback.streams.stagger import LOOK_AGAIN_S, Stagger
from acpfs.writeback.streams.stream_queue import StreamQueue
from acpfs.writeback.streams.streams import SMALL_BYTES_MAX, HeldUpError, Stream, Streamer

REWRITTEN_S_MAX = 30.0
"""A file that is rewritten faster than it streams is persisted about this often."""
SHORT_SHARE = 4
"""RAM is short when all but a quarter of the budget is dirty."""

_log = get_logger(__name__)


def _at_once(action: Callable[[], None]) -> None:
    action()


class Engine:
    """Runs the operation log: streams ahead in parallel, commits in order."""

    def __init__(  # noqa: PLR0915  # one statement for each part
        self,
        parts: DrainParts,
        manifest: Manifest,
        spill: Spill | None = None,
        before: Callable[[Sequence[Op]], None] = lambda _ops: None,
        place: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Starts nothing; `run` does.

        `spill`: where versions are that have left RAM; `before`: see `Committer`; `place`: see
        `Stagger`.
        """
        self._parts = parts
        self._lock = parts.lock
        self._listener = (listener := parts.listener)
        self.section = parts.section
        self._lower = (lower := parts.lower)
        self._ops = (log := parts.log)
        self._tier = (tier := parts.tier)
        self._calls = parts.calls
        self._counters = parts.counters
        settings = parts.settings
        self._due: dict[Seq, float] = {}
        self._noted = 0
        self._paused = False
        runtime = parts.runtime
        self._retry = RetryPolicy(settings.retry_delay_min_s, settings.retry_delay_max_s, runtime)
        self._calls.health.retries_every(settings.retry_delay_max_s)
        self._garbage = Garbage(lower, self._calls.streams)
        # A journal may lag: after a loss of RAM it would name a staging file that is gone, of a
        # version of which nobody has a copy.
        mirror = None if spill is None else spill.mirror
        self._when_safe = _at_once if mirror is None else mirror.when_safe
        # a spare is written to, which a version that the journal names must not be
        self._spares = Spares(parts, self._garbage.remove_nowait, reuses_given_up=mirror is None)
        equal = EqualFiles(parts, manifest.digest, lambda: bool(self.gate.has_peers))
        give_way = GiveWay(listener.is_writing, self._is_pressed, log.clock.age_s, runtime)
        self._scheduler = Scheduler(give_way, settings.bandwidth, settings.streams, runtime)
        self._checksums = WaitingChecksums(parts, give_way)
        self._streamer = Streamer(
            parts,
            self._scheduler,
            self._garbage.remove,
            self._spares,
            spill,
            equal,
            self._go_on,
        )
        self._conflicts = Conflicts(parts)
        applied = self._streamer.applied
        there = Whereabouts(lower, parts.tree, log, parts.lock, listener.left_as)
        placing = Placing(parts)
        self._committer = Committer(
            parts,
            placing,
            manifest,
            applied,
            self._conflicts,
            self._spares,
            there,
            before,
        )
        self._flusher = Flusher(
            parts, self._retry, Recheck(parts, self._committer, placing, there).look
        )
        self._queue = StreamQueue(
            log, self._due, listener.version_of_open_file, settings.streams, runtime.clock
        )
        self._failures = Failures(parts, self._queue, self._retry, self._due)
        pointers = Pointers(settings.pointer_patterns, listener.is_directory)
        scopes = Scopes(
            parts.tree,
            listener.path_of,
            listener.is_directory,
            pointers.takes,
            log.needs.of,
            Checkpoints(settings.checkpoint_patterns).of,
        )
        freed = lambda op: self.guard.is_free(op)  # noqa: E731, PLW0108 - there is no guard yet
        self.gate: Gate = Gate(
            log,
            pointers,
            settings.cluster_order,
            freed,
            listener.directory_of,
            scopes,
            Placed(parts.state),
            self._supersede,
        )
        self.guard: Guard = Guard(parts, self.gate)
        self._order = Order(parts, pointers, self.gate, self._due, self._elide, self.guard)
        self.texts_of_pointers = self._order.standing.texts
        self._manifest = ManifestWriter(manifest, self._calls.commits, is_idle=lambda: not len(log))
        self._courtesy = Courtesy(
            listener.idle_s, lambda: log.is_awaited() or tier.has_waiting(), runtime.clock.now
        )
        self.stagger = Stagger(settings.stagger_s, place, runtime.clock.now)
        self._streams_stand_back = False
        self._commits_stand_back = False
        self._stream_bell = Bell()
        self._commit_bell = Bell()
        self._staged = Staged(log, self._order.has_work)
        self._rewritten_since: dict[Seq, float] = {}
        self._before: Future[None] | None = None
        self.set_streams(settings.streams)
        log.follow(self._appended, self.wake)

    # -- life

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Remove stale staging files, then drain until cancelled.

        Reports started at once: nothing here waits for the backing directory.
        """
        task_status.started()
        self._resume()
        try:
            if self._before is not None:
                await outcome(self._before)
            await self._prepare()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._manifest.run)
                nursery.start_soon(self.guard.run)
                nursery.start_soon(self._checksums.run)
                nursery.start_soon(self._commit_forever)
                nursery.start_soon(self._stream_forever, nursery)
        finally:
            self._stop()

    def begin_after(self, before: Future[None]) -> None:
        """Have `run` wait first: a commit that a dead worker began may still be carried out, and
        must not come after its successors.
        """
        self._before = before

    def _is_pressed(self) -> bool:
        """Whether large streams have no time to stand back.

        Without the lock: an answer that is a moment old does.

        What is clean does not count: in use RAM is full of it, and it leaves for whoever writes.
        """
        budget_bytes = self._tier.most_bytes() - self._tier.withheld_bytes
        is_short = self._ops.sizes.dirty_bytes * SHORT_SHARE > budget_bytes * (SHORT_SHARE - 1)
        return self._ops.is_awaited() or self._tier.has_waiting() or is_short

    def _resume(self) -> None:
        """Times of an earlier run mean nothing on this run's clock."""
        self._committer.stopped = False
        self._scheduler.open()
        with self._lock:
            self._due.clear()
            self._failures.resume()
            self._order.room.resume()
            self._spares.begin()
            self._queue.wake_all()

    def _stop(self) -> None:
        """Threads that are still out see it at their next step; one that hangs does no harm when it
        comes back.
        """
        self._committer.stopped = True
        with self._lock:
            for stream in self._queue.active.values():
                stream.abandoned = True
        self._scheduler.close()

    async def _prepare(self) -> None:
        tries = 0
        while not await self._prepared():
            tries += 1
            await trio.sleep(self._retry.delay_s(tries))

    async def _prepared(self) -> bool:
        try:
            await outcome(self._calls.commits.submit("prepare", self._clean_up))
        except OSError as error:
            _log.warning(
                "backing directory does not let the drain begin; will be retried",
                error=errno_name(error.errno),
            )
            return False
        return True

    def _clean_up(self) -> None:
        """What an earlier worker left in the staging directory and no operation needs, and open."""
        self._committer.shut_directories()
        self._manifest.manifest.remove_unfinished()
        self._manifest.manifest.load()
        found = self._lower.list_staging()
        kept = self._lower.list_kept()
        with self._lock:  # no step: a worker that ends meanwhile has closed its state
            self.guard.found_kept(kept)
            versions = [op.version for op in self._ops if op.version is not None]
            needed = {
                version.staging_name
                for version in versions
                if version.is_staged or not version.is_local
            }
            needed |= self._listener.staging_in_use()
            for name in found:
                if name not in needed and not name.startswith(ASIDE_PREFIX):
                    # the earlier worker's journal may count still, and name it
                    self._when_safe(partial(self._garbage.remove_nowait, name))

    def _appended(self, op: Op) -> None:
        """Small work rings at nobody who stands back: each ring costs 0.1 ms of the interpreter,
        and they look again by themselves.
        """
        self.gate.note(op)
        self._checksums.appended(op)
        if not (self._streams_stand_back and _is_small(op)):
            self._stream_bell.ring()
        if not self._commits_stand_back:
            self._commit_bell.ring()

    def wake(self) -> None:
        """There may be something to do.

        Thread-safe, cheap, may be called under the lock and before `run`.
        """
        self._stream_bell.ring()
        self._commit_bell.ring()

    # -- streams

    async def _stream_forever(self, nursery: trio.Nursery) -> None:
        while True:
            with self.section():
                self._note_new()
                # Asked once for both: a burst that ends between two questions would leave small
                # work neither begun nor looked at again.
                stand_back_s = self._courtesy.delay_s() if len(self._ops) else 0.0
                self._streams_stand_back = bool(stand_back_s)
                stagger_s = self.stagger.delay_s(pressed=self._is_pressed())
                started = list(self._start_streams(small=not stand_back_s))
                due = math.inf if self._paused else self._queue.next_due(trio.current_time())
            if stand_back_s:
                due = min(due, trio.current_time() + stand_back_s)
            if stagger_s:
                due = min(due, trio.current_time() + min(stagger_s, LOOK_AGAIN_S))
            due = min(
                due,
                self._garbage.sweep(trio.current_time()),
                trio.current_time() + self._spares.sweep(),
            )
            for stream in started:
                nursery.start_soon(self._stream, stream)
            await self._stream_bell.heard(due)

    def _note_new(self) -> None:
        new = self._ops.since(self._noted)
        self._noted = self._ops.last_seq
        for op in new:
            if op.version is not None and op.version.state is VersionState.COMPLETE:
                self._queue.add(op)
                if not _is_small(op):
                    self.stagger.logged(op.version.size)
        if self._ops.parked_count:  # what could not be stored may have been deleted or rewritten
            for ino in {op.ino for op in new}:
                for op in self._ops.pending_of(ino):
                    if op.parked and self._ops.get(op.seq) is op:
                        self._elide(op)

    def _start_streams(self, *, small: bool) -> Iterator[Stream]:
        while (stream := self._next_stream(trio.current_time(), small=small)) is not None:
            yield stream

    def _next_stream(self, now: float, *, small: bool) -> Stream | None:
        if self._paused or self._committer.stopped:
            return None
        large = not self.stagger.delay_s(pressed=False)
        small = small and not self._staged.is_enough(len(self._queue.active))
        while (op := self._queue.next(now, small=small, large=large)) is not None:
            if not (self._elide(op) or self._may_be_left_out(op)):
                self._due.pop(op.seq, None)
                stream = self._queue.start(op)
                if not _is_small(op):
                    self._scheduler.comes(op.seq, op.logged_at, stream)
                return stream
        return None

    async def _stream(self, stream: Stream) -> None:
        """Stream a version, and others after it as long as there are some and nothing fails."""
        job = [stream]
        error: OSError | None = None
        is_held_up = False
        try:
            await outcome(self._calls.streams.submit("stream", self._stream_in_turn, job))
        except HeldUpError:
            is_held_up = True
        except AbandonedError:
            pass
        except OSError as failure:
            error = failure
        if job and is_held_up:
            self._give_place(job[0])
        elif job:
            with self.section():
                self._ended(job[0], error)
        self.wake()

    def _give_place(self, stream: Stream) -> None:
        """An application holds up a write to the version's file: others are streamed meanwhile, and
        this one when that is over.
        """
        with self.section():
            over = self._listener.when_still(stream.version)
            self._queue.end(stream)
            self._scheduler.gone(stream)  # its first piece may have been still to come
            if self._ops.get(stream.op.seq) is not stream.op or stream.abandoned:
                return
            stream.version.state = VersionState.COMPLETE
        if over is None:
            self._is_still(stream.op)
        else:  # not under the lock, as it may be over by now
            over.add_done_callback(lambda _over: self._is_still(stream.op))

    def _is_still(self, op: Op) -> None:
        """Also in the thread that has waited for the write."""
        with self.section():
            if self._ops.get(op.seq) is op and op.version is not None:
                self._queue.add(op)
                self._listener.still_frozen(op.version)  # it is what the file is now
        self._stream_bell.ring()

    def _stream_in_turn(self, job: list[Stream]) -> None:
        """In a stream thread.

        Going on here saves two task switches per file, which is most of what a small file costs.
        """
        while job:
            self._streamer.run(job[0])
            following = job.pop().following
            job += [] if following is None else [following]
            self._commit_bell.ring()

    def _go_on(self, stream: Stream) -> None:
        """Under the lock: a stream is done, and its thread takes the next one."""
        self._ended(stream, None)
        stream.following = self._next_stream(-math.inf, small=not self._courtesy.delay_s())

    def _ended(self, stream: Stream, error: OSError | None) -> None:
        self._queue.end(stream)
        self._scheduler.gone(stream)
        if self._ops.get(stream.op.seq) is stream.op and not stream.abandoned:
            if error is None:
                self._staged.add(stream.op)
                if not _is_small(stream.op):
                    self.stagger.staged(stream.version.size)
            else:
                self._failed(stream.op, error)

    def _failed(self, op: Op, error: OSError) -> None:
        self._failures.failed(op, error)
        self.guard.failed(op, error.errno)
        self.gate.failed(error.errno)
        self._order.room.failed(op, error.errno, trio.current_time())
        if error.errno in FULL_ERRNOS:
            self._spares.let_go()

    # -- commits

    async def _commit_forever(self) -> None:
        while True:
            with self.section() as section:
                if not self._paused and self._failures.try_parked(trio.current_time()):
                    self._stream_bell.ring()
                group, due = self._next_group(trio.current_time())
                untimed = self._flusher.take_untimed()
                # That a version is staged is recorded with the word that its commit begins.
                section.is_followed = bool(group) and not untimed.directories
            if untimed.directories:
                await self._flusher.flush(untimed)
                with self.section():
                    self._finish(untimed)
            if group:
                await self._commit(group)
            elif self._order.standing.wanted:
                read = self._order.standing.read
                await outcome(self._calls.commits.submit("read pointers", read))
            else:
                await self._commit_bell.heard(
                    min(due, self._failures.next_parked() if not self._paused else math.inf)
                )

    def _next_group(self, now: float) -> tuple[list[Op], float]:
        """The next group, or when to look again.

        Asks first whether to stand back: looking costs more than committing does.
        """
        first = self._ops.first()
        self._commits_stand_back = False
        if first is None or self._paused:
            return [], math.inf
        if (_is_small(first) or not self._order.is_ready(first, now)) and (
            stand_back_s := self._courtesy.delay_s()
        ):
            self._commits_stand_back = True
            return [], now + stand_back_s
        return self._order.group(now)

    async def _commit(self, group: list[Op]) -> None:
        result = await outcome(self._calls.commits.submit("commit", self._committer.run, group))
        # Carried out, flushed, and only then out of the log: an operation that is not there any
        # more counts as persisted for everybody (fsync, other members' pointers, the guard). A
        # worker that dies before carries the group out again, and finds it done.
        if result.done:
            await self._flusher.flush(result)
        with self.section():
            self._finish(result)
            failed = result.failed
            error = result.error
            if (
                failed is not None and error is not None and self._ops.get(failed.seq) is failed
            ):  # else given up before it was begun
                self._failed(failed, error)
            for op in result.undone:
                self._spares.given_up(op.version)
                op.take(Step.LOST)
                self._ops.save(op)
                self._stream_again(op)
            if result.lost is not None:
                self._stream_again(result.lost)
        if result.done:
            self._manifest.ring()
        self._stream_bell.ring()

    def _finish(self, result: GroupOutcome) -> None:
        self._counters.commit_groups += bool(result.done)
        for op, stat in result.done:
            self.guard.finishing(op)
            self.gate.persisted(op)
            self._failures.persisted(op)
            self._remove(op)
            self._counters.persisted_ops += 1
            if op.version is not None:
                self._counters.persisted_bytes += op.version.size
                self._spares.persisted(op.version)
            self._listener.persisted(op, stat)
        self.guard.noted(op for op, _stat in result.done)
        if any(op.kind in REMOVING for op, _stat in result.done) and (
            wanting := self._order.room.try_again()
        ):
            for op in wanting:
                self._due.pop(op.seq, None)
            self._queue.wake_all()
        if not len(self._ops):
            self.stagger.emptied()
        for ino, settled in result.settled:
            self._listener.directory_settled(ino, settled)

    def _remove(self, op: Op) -> None:
        """Out of the log and out of all that is kept per operation."""
        self._its_turn(op)
        self._ops.remove(op)
        self._forget(op)

    def _forget(self, op: Op) -> None:
        self._due.pop(op.seq, None)
        self._staged.remove(op)
        self._rewritten_since.pop(op.seq, None)
        self._failures.forget(op)
        if op.version is not None:
            self._streamer.applied.pop(op.version.vid, None)

    def _stream_again(self, op: Op) -> None:
        self._staged.remove(op)
        self._failures.staging_lost(op)

    # -- leaving out

    def _elide(self, op: Op) -> bool:
        """Leave out what nets out to nothing from here on; True when that was so."""
        window = self._ops.window_to_elide(op)
        if not window or any(
            self._is_worth_finishing(left_out) or self._is_told_of(left_out) for left_out in window
        ):
            return False
        for left_out in window:
            heir = self._its_turn(left_out)
            if heir is not None:
                self._rewritten_since[heir.seq] = self._rewritten_since.get(
                    left_out.seq, left_out.logged_at
                )
        self._ops.leave_out(window)
        self._counters.elided_ops += len(window)
        for left_out in window:
            self._give_up(left_out)
        return True

    def _is_worth_finishing(self, op: Op) -> bool:
        """Whether a stream goes on although there is a newer version: else a file rewritten all the
        time would never be persisted.
        """
        if (
            op.withheld
            or op.version is None
            or op.version.state is VersionState.COMPLETE
            or self._ops.replacement(op) is None
        ):
            return False
        age_s = self._ops.clock.now() - self._rewritten_since.get(op.seq, op.logged_at)
        return self._ops.waited_for(op) or age_s > REWRITTEN_S_MAX

    def _is_told_of(self, op: Op) -> bool:
        """Whether other members wait for it by its time: its heir's gate would tell a later one,
        and pass what they closed in between.

        Not when it is parked: nobody knows when it will be there, if ever.
        """
        heir = self._ops.replacement(op)
        return heir is not None and not op.parked and not self.gate.is_open(heir)

    def _may_be_left_out(self, op: Op) -> bool:
        """Whether it lies between two others, of which the newer one may stand for it soon: it is
        streamed when it is the first.

        So a pointer that is rewritten in a loop does not cost a stream for each time that it was.
        """
        earlier = self._ops.replaced_by(op)
        return earlier is not None and not earlier.parked and self._is_told_of(op)

    def _its_turn(self, op: Op) -> Op | None:
        """The operation is about to leave the log; what replaces it, if anything, is next of its
        node.
        """
        heir = self._ops.replacement(op)
        if (
            heir is not None
            and heir.version is not None
            and heir.version.state is VersionState.COMPLETE
        ):
            self._queue.add(heir)
            self._stream_bell.ring()
        return heir

    def _give_up(self, op: Op) -> None:
        """The operation was taken out of the log without being carried out."""
        if op.begun:
            self._committer.owes(op)
        self._forget(op)
        stream = self._queue.active.get(op.seq)
        if stream is not None:
            stream.abandoned = True
            self._scheduler.wake()  # its thread need not wait for its turn
        elif (
            op.version is not None
            and not self._listener.keeps_staging(op.version)
            and not self._spares.given_up(op.version)
            and op.version.staging_name
        ):
            self._when_safe(partial(self._garbage.remove_nowait, op.version.staging_name))
        self._listener.dropped(op)

    def _supersede(self, op: Op) -> list[Op]:
        """A pointer that another member has replaced since: left out with what was stored for it
        alone. Under the lock.

        Not where anything has begun, or a later operation here moves, removes or replaces what it
        makes: that needs it there.
        """
        if self._ops.is_victim(op.ino):
            return []
        given_up = self._ops.pending_of(op.ino)
        if not all(one is op or _is_part(one, op) for one in given_up):
            return []
        if any(one.begun or one.started or one.stage is not Stage.LOGGED for one in given_up):
            return []
        former = (op.parent, op.name) if op.kind is OpKind.RENAME else None
        is_there = former in self._parts.tree.places(op.ino)
        for one in given_up:
            self._its_turn(one)
            self._ops.remove(one)
        self._listener.superseded(op, given_up, former if is_there else None)
        for one in given_up:
            self._give_up(one)
        self._counters.elided_ops += len(given_up)
        self.wake()
        return given_up

    # -- for the layers above

    def persisted(self, seq: Seq, node: Ino | None = None) -> Future[None]:
        """Done when every operation up to `seq` is persisted; fails with the errno of one that was
        parked.

        With `node`: parked operations of other members do not matter. Same as `log.when_done`.
        Thread-safe.
        """
        with self._lock:
            return self._ops.when_done(seq, node)

    def retry(self, seqs: Iterable[Seq] = ()) -> int:
        """Try parked operations again (all of them when none is named), and the scheduled retries
        now; returns how many. Thread-safe.
        """
        wanted = set(seqs)
        with self.section():
            # What is parked and not sealed has bytes nowhere any more: in the order all would wait
            # for it.
            parked = [
                op
                for op in self._ops.parked()
                if (not wanted or op.seq in wanted) and not op.unsealed
            ]
            for op in parked:
                self._failures.forget(op)
            self._failures.unpark(parked)
            count = len({op.seq for op in parked} | self._due.keys())
            self._due.clear()
            self._queue.wake_all()
        self.wake()
        return count

    def discard(self, seqs: Iterable[Seq]) -> int:
        """Give operations up, with those that need them (below a directory that will not be made);
        returns how many. Thread-safe.
        """
        with self.section():
            chosen = with_dependents(self._ops, self._parts.tree, set(seqs))
            for op in chosen:
                self._its_turn(op)
                self._ops.remove(op)
                self._give_up(op)
            self._counters.discarded_ops += len(chosen)
        self.wake()
        return len(chosen)

    def drained(self) -> bool:
        """Nothing is left to do, the manifest is written and staging files are gone (or cannot be),
        spares too. Thread-safe.
        """
        with self._lock:
            if len(self._ops):
                return False
            self._spares.let_go()
            return self._manifest.is_settled and self._garbage.is_settled and self.guard.is_settled

    async def recorded(self) -> None:
        """Wait until the written manifest has all that is committed now, or cannot be written."""
        await self._manifest.written()

    def hold(self, paused: bool) -> None:
        """Start nothing new, or go on. Thread-safe."""
        with self._lock:
            self._paused = paused
        self.wake()

    def expect_foreign_changes(self, until: Seq = EVERYTHING, inos: Iterable[Ino] = ()) -> Guarding:
        """Others may have changed the backing directory since the operations up to `until` were
        logged: overwrite nothing of theirs.

        Returns what to give here if that turns out not to be so.
        """
        with self.section():
            return self._conflicts.guard(until, inos)

    def set_bandwidth(self, bytes_per_s: int) -> None:
        """0: no limit. Takes effect within a tenth of a second. Thread-safe."""
        self._scheduler.set_bandwidth(bytes_per_s)

    def set_streams(self, count: int) -> None:
        """Files copied at the same time from now on. Thread-safe."""
        with self._lock:
            self._queue.set_streams(count)
            self._scheduler.set_streams(count)
            self._calls.streams.threads_max = max(
                self._calls.streams.threads_max, self._queue.threads_max
            )
        self.wake()

    def statistics(self) -> EngineStatistics:
        """What `status`, the metrics and the tests see. Thread-safe."""
        with self._lock:
            front = self._ops.front(QUEUE_ENTRIES_MAX)
            now = self._parts.runtime.clock.wall()
            return EngineStatistics(
                counters=replace(self._counters),
                queued_ops=len(self._ops),
                dirty_bytes=self._ops.sizes.dirty_bytes,
                staged_bytes=self._staged.bytes,
                oldest_logged_at=front[0].logged_at if front else None,
                queue=queue_entries(front, self._listener, self._order.why, now),
                streaming=queue_entries(
                    (s.op for s in self._queue.active.values() if not s.abandoned),
                    self._listener,
                    self._order.why,
                    now,
                ),
                parked=queue_entries(self._ops.parked(), self._listener, self._order.why, now),
                held=self._paused,
                streams_max=self._queue.streams_max,
                conflicts=tuple(self._conflicts.told),
                conflicts_total=self._conflicts.total,
                guard=self.guard.statistics(),
            )


def _is_part(one: Op, pointer: Op) -> bool:
    """Whether an operation on the same node does nothing but what the pointer shows."""
    if one.kind in ATTRIBUTES:
        return True
    is_its_file = one.kind in (OpKind.STORE, OpKind.SYMLINK) and one.seq < pointer.seq
    return is_its_file and (one.parent, one.name) == (pointer.parent, pointer.name)


def _is_small(op: Op) -> bool:
    return op.version is None or op.version.size <= SMALL_BYTES_MAX
