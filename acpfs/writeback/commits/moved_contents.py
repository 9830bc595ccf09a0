"""Contents that are renamed next: put straight where the rename puts them (`Pairs`).

What others have under the temporary name by now stays theirs. Where this member itself has
something there, such as an earlier content of the file, both are carried out one by one: no call
takes one name away and gives the other at once, and nobody may see a state that the program never
had. Both operations are recorded in one transaction. A worker that dies before has a next one carry
both out again, which finds the content in place. Called in the commit thread.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import dataclass

from acpfs.backing.lower import LowerPath, LowerStat
from acpfs.writeback.commits.conflicts import Conflicts
from acpfs.writeback.commits.placing import Placing, StagingLostError
from acpfs.writeback.commits.store_runs import StoreRuns, ours
from acpfs.writeback.log.lower_tree import Place
from acpfs.writeback.log.ops import Op, OpKind, VersionState
from acpfs.writeback.parts import DrainParts
from acpfs.writeback.streams.equal import is_linked


@dataclass(frozen=True, slots=True)
class Moved:
    """A pair that is being carried out."""

    content: Op
    move: Op
    at: Place
    source: LowerPath
    target: LowerPath
    to: Place


class MovedContents:
    """See above."""

    def __init__(
        self,
        parts: DrainParts,
        placing: Placing,
        conflicts: Conflicts,
        stores: StoreRuns,
        complete_attributes: Callable[[Op, LowerPath, LowerPath | None], None],
    ) -> None:
        """`complete_attributes`: gives a staging file what it lacks, and the xattrs of a file that
        it replaces.
        """
        self._parts = parts
        self._lower = parts.lower
        self._tree = parts.tree
        self._lock = parts.lock
        self._placing = placing
        self._conflicts = conflicts
        self._stores = stores
        self._complete_attributes = complete_attributes

    def is_straight(self, pair: Moved) -> bool:
        """Whether it can be done in one: nothing of this member's lies under the temporary name."""
        if self._conflicts.concerns(pair.content) or self._conflicts.concerns(pair.move):
            return False
        version = pair.content.version
        if version is not None and (version.state is not VersionState.STAGED or is_linked(version)):
            return False
        return not self._is_ours(pair)

    def _is_ours(self, pair: Moved) -> bool:
        """Whether this member has put there what lies under the temporary name."""
        if self._parts.node_at(pair.at) is None:
            return False
        st = self._parts.look(pair.source)
        return st is not None and not self._conflicts.is_foreign(pair.at, st)

    def put(self, pair: Moved, came: Callable[[], None], *, doubtful: bool) -> LowerStat | None:
        """Have the content under its last name; not recorded yet. None: it was there, and somebody
        else has put a later one in its place since.

        `came`: called when it is there, though something of it may fail yet. `doubtful`: it may
        have been put there before.

        Raises:
            StagingLostError: its staging file is gone: it has to be streamed again.
        """
        if pair.content.kind is OpKind.SYMLINK:
            return self._put_link(pair, came, doubtful=doubtful)
        version = pair.content.version
        assert version is not None
        staging = self._lower.staging_path(version.staging_name)
        self._complete_attributes(pair.content, staging, None)
        try:
            staging = self._placing.put_version(version, pair.target)
        except StagingLostError:
            if doubtful and self._was_replaced(pair, self._parts.look(pair.target)):
                return None
            raise
        came()
        st = self._lower.lstat(pair.target)
        if st.size != version.size:
            raise StagingLostError
        if self._placing.has_left(staging, st, version.staging_ino):
            # both were names of one file: that rename does nothing
            self._lower.remove_staging(version.staging_name)
            st = self._lower.lstat(pair.target)
        return ours(self._lower, pair.content, st)

    def _was_replaced(self, pair: Moved, st: LowerStat | None) -> bool:
        """Whether another one lies where the content was to come, and is later."""
        given_ns = pair.content.meta.mtime_ns
        if st is None or stat.S_ISDIR(st.mode) or given_ns is None:
            return False
        return st.mtime_ns > given_ns and self._conflicts.is_foreign(pair.to, st)

    def _put_link(
        self, pair: Moved, came: Callable[[], None], *, doubtful: bool
    ) -> LowerStat | None:
        op = pair.content
        present = self._parts.look(pair.target) if doubtful else None
        is_made = (
            present is not None
            and stat.S_ISLNK(present.mode)
            and self._placing.is_made(op, pair.target)
        )
        if doubtful and not is_made and self._was_replaced(pair, present):
            return None
        if not is_made:
            self._placing.put_over(
                f"entry-{op.seq}", pair.target, lambda path: self._placing.make(op, path)
            )
        came()
        self._lower.apply(pair.target, op.meta)
        return self._lower.lstat(pair.target)

    def record(self, pair: Moved, st: LowerStat | None) -> None:
        """Under the lock, in a step of the state."""
        version = pair.content.version
        self._tree.remove(*pair.at)
        if st is None:
            self._tree.remove(*pair.to)
            if version is not None:
                version.state = VersionState.COMMITTED
        else:
            self._tree.add(pair.content.ino, *pair.to)
            if version is not None:
                self._stores.record(version, [pair.target], st)
        self._parts.log.mark_committed(pair.content)
