"""New small files, a run of them at a time: one locked section before, the calls of each, one
locked section after.

A file that is committed alone takes the lock five times and ends two transactions, and each time
the commit thread waits behind all streams. Most of what is saved in large numbers is as plain as
can be, though: a new file, staged, with a name that nothing else has. Those are begun together,
renamed one after the other in log order, and recorded together.

Between a rename and its record the worker may die. Then all of the run is in doubt and not one
operation, and the next worker carries all of it out again. That is harmless because each makes
something of its own: no two of a run have the same node or name, so each finds its file in place
and the names keep what they show. Whatever is not plain is a run's end, and is carried out alone
(`Committer`): so is one of a run whose calls answered otherwise than expected. Called in the commit
thread.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from acpfs.backing.lower import Lower, LowerPath, LowerStat
from acpfs.errors import PERMANENT_ERRNOS
from acpfs.types import Ino
from acpfs.writeback.commits.conflicts import Conflicts
from acpfs.writeback.commits.group import GroupOutcome
from acpfs.writeback.evidence.whereabouts import MOVING
from acpfs.writeback.log.lower_tree import Place
from acpfs.writeback.log.ops import Op, OpKind, Version, VersionState
from acpfs.writeback.log.stages import Step
from acpfs.writeback.manifest.manifest import Manifest
from acpfs.writeback.parts import DrainParts
from acpfs.writeback.streams.equal import is_linked
from acpfs.writeback.streams.spares import SPARE_BYTES_MIN, Spares

RUN_OPS_MAX = 32
"""Bounds the time under the lock to about a millisecond, and what a request's look at operations in
doubt costs.
"""
CERTAIN = PERMANENT_ERRNOS | {errno.ENOSPC, errno.EDQUOT}
"""Answers of the first call that mean that nothing was done.

After any other the operation may have been carried out: never left out.
"""
_TO_BE_LOOKED_INTO = frozenset({errno.ENOENT, errno.EXDEV, errno.EACCES})
"""Answers to a rename that have causes which can be put right (`Committer`)."""


@dataclass(frozen=True, slots=True)
class _Store:
    op: Op
    version: Version
    place: Place
    staging: LowerPath
    target: LowerPath


class StoreRuns:
    """See above."""

    def __init__(
        self,
        parts: DrainParts,
        manifest: Manifest,
        applied: dict[int, str],
        conflicts: Conflicts,
        spares: Spares,
        is_stopped: Callable[[], bool],
    ) -> None:
        """`applied`: see `Streamer.applied`; `is_stopped`: whether the group is to end early."""
        self._lower = parts.lower
        self._tree = parts.tree
        self._log = parts.log
        self._state = parts.state
        self._lock = parts.lock
        self._manifest = manifest
        self._applied = applied
        self._conflicts = conflicts
        self._spares = spares
        self._parts = parts
        self._is_stopped = is_stopped

    def carry_out(self, ops: list[Op], before: Callable[[Sequence[Op]], None]) -> GroupOutcome:
        """Those at the front that are plain, as far as all goes well.

        None were done: the first one is to be carried out alone.

        `before`: see `Committer`.
        """
        run = GroupOutcome()
        stores = self._begin(ops, run, before)
        if stores:
            self._make_visible(stores, run)
            self._record_all(stores, run)
        return run

    # -- beginning

    def _begin(
        self, ops: list[Op], run: GroupOutcome, before: Callable[[Sequence[Op]], None]
    ) -> list[_Store]:
        stores: list[_Store] = []

        def choose() -> list[Op]:
            stores.extend(self._plain(ops))
            return [store.op for store in stores]

        return stores if begin_together(self._parts, choose, before, run) else []

    def _plain(self, ops: list[Op]) -> list[_Store]:
        if any(op.kind in MOVING for op in self._log.in_doubt()):
            # the paths may be others by now; and without one `CatchingUp` has nothing to record
            return []
        bases: dict[Ino, LowerPath | None] = {}
        found: dict[Ino, _Store] = {}
        places: set[Place] = set()
        for op in ops[:RUN_OPS_MAX]:
            store = self._plain_one(op, bases)
            if store is None or op.ino in found or store.place in places:
                break
            found[op.ino] = store
            places.add(store.place)
        return list(found.values())

    def _plain_one(self, op: Op, bases: dict[Ino, LowerPath | None]) -> _Store | None:
        """None: it is not plain, and something of what `Committer` does with a single store may
        have to be done.
        """
        version = op.version
        if (
            op.kind is not OpKind.STORE
            or version is None
            or op.begun
            or op.victim
            or self._log.get(op.seq) is not op
        ):
            return None
        if (
            version.state is not VersionState.STAGED
            or not version.is_local
            or version.size >= SPARE_BYTES_MIN
            or is_linked(version)
        ):
            return None
        # `covers` is all that `concerns` means for a store: what it leaves out replaces others'
        # files, alone as in a run.
        if self._conflicts.covers(op) or self._applied.get(version.vid) != op.meta.to_json():
            return None
        place = self._conflicts.place(op, op.parent, op.name)
        if op.ino in self._tree or self._tree.node_at(*place) is not None:
            return None
        if place[0] not in bases:
            bases[place[0]] = self._tree.path(place[0])
        base = bases[place[0]]
        return (
            None
            if base is None
            else _Store(
                op,
                version,
                place,
                self._lower.staging_path(version.staging_name),
                (*base, place[1]),
            )
        )

    # -- the calls

    def _make_visible(self, stores: list[_Store], run: GroupOutcome) -> None:
        """In log order, up to the first that does not go as expected."""
        try:
            with self._lower.keeping_directories():
                for at, store in enumerate(stores):
                    if self._is_stopped():
                        take_back(behind.op for behind in stores[at:])
                        break
                    if not self._rename(store, run):
                        take_back(behind.op for behind in stores[at + 1 :])
                        break
        except OSError:  # a directory has moved: where its files are, each has to find out
            run.done.clear()

    def _rename(self, store: _Store, run: GroupOutcome) -> bool:
        op = store.op
        try:
            self._lower.rename(store.staging, store.target)
        except OSError as error:
            if error.errno in _TO_BE_LOOKED_INTO:
                take_back([op])
            else:
                _failed(op, error, run)
            return False
        try:
            st = self._lower.lstat(store.target)
            still = self._parts.look(store.staging)
        except OSError:
            return False
        if st.size != store.version.size:
            op.take(Step.FAILED)
            run.lost = op
            return False
        if still is None:
            run.done.append((op, ours(self._lower, op, st)))
        return still is None

    # -- the end

    def record(self, version: Version, targets: Iterable[LowerPath], st: LowerStat) -> None:
        """The version lies at these paths. Under the lock."""
        for target in targets:
            if version.digest:
                self._manifest.put(target, version.digest, version.size)
            else:
                self._manifest.remove(target)
        version.state = VersionState.COMMITTED
        self._spares.shown(version, st)
        self._applied.pop(version.vid, None)

    def _record_all(self, stores: list[_Store], run: GroupOutcome) -> None:
        with self._lock, self._state.step():
            for store, (op, st) in zip(stores, run.done, strict=False):
                assert st is not None
                self._tree.add(op.ino, *store.place)
                self.record(store.version, [store.target], st)
                self._log.mark_committed(op)
        for op, st in run.done:
            self._conflicts.noted(op, st)


def ours(lower: Lower, op: Op, st: LowerStat) -> LowerStat:
    """What was put there, also where another member has put its own over it by the time that it was
    looked at: that is to be noticed.
    """
    given_ns = op.meta.mtime_ns
    granularity_ns = lower.features.time_granularity_ns
    if (
        op.version is None
        or st.ino == op.version.staging_ino
        or given_ns is None
        or abs(st.mtime_ns - given_ns) < granularity_ns
    ):
        # with the time that it was given it is ours, on a file system that numbers files anew
        return st
    return st._replace(ino=op.version.staging_ino, mtime_ns=given_ns)


def begin_together(
    parts: DrainParts,
    choose: Callable[[], list[Op]],
    before: Callable[[Sequence[Op]], None],
    run: GroupOutcome,
) -> list[Op]:
    """Begin in one step what is chosen under the lock, if that is more than one; returns them, or
    none.
    """
    ops: list[Op] = []
    try:
        with parts.lock:
            ops = choose()
            if len(ops) < 2:
                return []
            for op in ops:
                parts.log.mark_begun(op)
            # else a next worker would take them for ones that nothing was done for
            parts.state.must_commit()
        before(ops)
    except OSError as error:
        take_back(ops[1:])
        _failed(ops[0], error, run)
        return []
    return ops


def _failed(op: Op, error: OSError, run: GroupOutcome) -> None:
    op.take(Step.TAKEN_BACK if error.errno in CERTAIN else Step.FAILED)
    run.failed = op
    run.error = error


def take_back(ops: Iterable[Op]) -> None:
    """Nothing was done for them.

    Their rows may go on saying that they were begun, which costs a next worker a look.
    """
    for op in ops:
        op.take(Step.TAKEN_BACK)
