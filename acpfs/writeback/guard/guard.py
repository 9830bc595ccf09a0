"""The guard: the last whole checkpoint of a save_dir stays on the backing directory until a newer
one is persisted.

Frameworks delete the old checkpoint before or right after they write the new one. The guard sets
such deletions aside, out of the order of the log: all else overtakes them and nothing waits for
them. They come back when a newer checkpoint is there as whole as theirs, when their time is up,
when an operator says so, or when the backing directory is full. With other members, whose guards
decide by themselves, pointers come back first, and what others' pointers may name only when those
are gone (`Gate.is_to_wait`). What is made under a name that they still hold replaces the file
(`_replace`) or moves the old directory aside (`_move_aside`). Used under the file system's lock;
`run` is a task of the engine, and looks at the backing directory on a thread.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable
from functools import partial

import trio

from acpfs.backing.lower import LowerPath
from acpfs.checkpoints import Checkpoints
from acpfs.drain_records import GuardedReport
from acpfs.logger import get_logger, shown
from acpfs.types import NO_INO, ROOT, Ino, Seq
from acpfs.writeback.arrival import Bell, outcome
from acpfs.writeback.engine_records import GuardStatistics
from acpfs.writeback.guard.former_paths import FormerPaths
from acpfs.writeback.guard.guarded import Guarded, Key, SpaceWatch
from acpfs.writeback.guard.survey import Inventory, Question, Survey, look
from acpfs.writeback.log.log import REMOVING
from acpfs.writeback.log.lower_tree import Place
from acpfs.writeback.log.ops import Op, OpKind
from acpfs.writeback.members.gate import Gate
from acpfs.writeback.parts import DrainParts

POLL_S = 10.0
"""How often the backing directory is looked at when nothing happens here: other members may
complete the newer checkpoint.
"""
PAUSE_S = 0.25
PAUSE_SHARE = 10.0
"""Between two looks lie at least a quarter of a second, and ten times what the last one took."""
QUIET_S = 60.0
"""A newer checkpoint of about the same size, but with other names, counts as whole when it has not
changed for so long.
"""
DECIDED_LOOK_S = 0.02
PATIENCE_S = 5.0
"""How long a drain waits for a look at a backing directory that does not answer."""
NUMBER_BYTES_MIN = 1 << 20
"""A directory called by a number alone and smaller than this is something else: caches and process
directories are called so, too.

So is one in which nothing looks like the state of a program (`Inventory.has_state`).
"""
NAME_BYTES_MAX = 255

_MAKING = frozenset({OpKind.STORE, OpKind.MKDIR, OpKind.SYMLINK, OpKind.MKNOD, OpKind.LINK})
_MOVING = frozenset({OpKind.RENAME, OpKind.EXCHANGE})
_log = get_logger(__name__)


class Guard:
    """Holds deletions back."""

    def __init__(self, parts: DrainParts, gate: Gate) -> None:
        """`gate`: lets go in two steps what other members' pointers may name."""
        self._log = parts.log
        self._tree = parts.tree
        self._lower = parts.lower
        self._listener = parts.listener
        self._now = parts.runtime.clock.now
        self._section = parts.section
        self._pool = parts.calls.syncs
        settings = parts.settings
        self._on = settings.keep_last_persisted
        self._time_s = settings.guard_time_s
        self._recogniser = Checkpoints(settings.checkpoint_patterns)
        self._former = FormerPaths(parts.tree, parts.state)
        self._held: dict[Key, Guarded] = {}
        self._keys: dict[Seq, Key] = {}
        """Under which of these a deletion is."""
        self._behind: dict[Seq, Op] = {}
        """Removals of directories above, which must come after."""
        self._places: dict[Place, Op] = {}
        self._nodes: Counter[Ino] = Counter()
        self._above: Counter[Ino] = Counter()
        self._space = SpaceWatch(parts.log)
        self._bell = Bell()
        self._orphans: tuple[LowerPath, ...] = ()
        self._gate = gate
        self._superseded: set[Seq] = set()
        """Deletions that were let go because a newer checkpoint is whole; a next worker, which does
        not know, has them wait.
        """
        self.released: Counter[str] = Counter()
        """How many checkpoints were let go, by reason."""
        for op in self._log:
            if op.committed and op.kind in _MOVING:
                self._note_move(op)

    def is_free(self, op: Op) -> None:
        """The gate lets a deletion pass that is held."""
        for held in self._held.values():
            if op.seq in held.ops:
                held.look_soon()
        self._bell.ring()

    # -- asked by the order

    def concerns(self, op: Op) -> bool:
        """Whether the operation removes something of a checkpoint, or what lies above one that is
        held.
        """
        if op.kind is OpKind.RMDIR and op.ino in self._above:
            return True
        return self._may_hold(op) and not self.is_too_early(op) and self._key(op) is not None

    def is_superseded(self, op: Op) -> bool:
        """Whether what the operation removes is of a checkpoint that a newer one of its run has
        replaced on the backing directory.
        """
        return op.seq in self._superseded

    def is_too_early(self, op: Op) -> bool:
        """Whether it is not known yet what the operation removes: what it removes is to be
        committed in the same group.
        """
        return self._may_hold(op) and not self._tree.has_what_it_removes(op)

    def _may_hold(self, op: Op) -> bool:
        return self._on and op.kind in REMOVING and not op.let_go and not op.begun

    def hold(self, op: Op) -> None:
        """Set the deletion aside; whether it has to stay there is looked at soon."""
        self._log.set_aside(op)
        self._listener.set_aside(op)
        self._index(op)
        self._bell.ring()

    def make_way(self, op: Op) -> bool:
        """Clear the operation's way of what is held; False: something else has to come first."""
        if not self._places:
            return True
        if op.kind is OpKind.STORE and op.ino in self._nodes:
            self._detach(op.ino)
        if op.victim in self._above:
            self._release(
                [held for held in self._held.values() if self._lies_below(held, op.victim)],
                "needed",
            )
            return False
        made: Place | None = None
        if op.kind in _MAKING:
            made = (op.parent, op.name)
        elif op.kind is OpKind.RENAME:
            made = (op.new_parent, op.new_name)
        held = self._places.get(made) if made is not None else None
        if held is None:
            return True
        if (
            held.ino == op.ino
        ):  # a name comes back to its file: nothing is lost by removing it first
            self._unindex(held)
            self._log.let_go(held)
            self._log.bring_back([held])
            return False
        if (
            held.kind is OpKind.UNLINK
            and op.kind is not OpKind.MKDIR
            and not self._listener.is_directory(op.ino)
        ):
            self._replace(held, op)
            return True
        takes_on = held.kind is OpKind.RMDIR and (
            op.kind is OpKind.MKDIR or self._listener.is_directory(op.ino)
        )
        self._move_aside(held, op.ino if takes_on else NO_INO)
        return False

    def _detach(self, ino: Ino) -> None:
        """A file that is deleted under a held name and rewritten under another: what lies under the
        held name stays as it is.

        It stays ours, too: a later worker holds it, and it goes where the directory goes that it
        lies in.
        """
        for place, op in self._places.items():
            if op.ino == ino:
                self._tree.add(op.old_content, *place)

    def _replace(self, held: Op, op: Op) -> None:
        """A new file takes the held one's name: one rename does both, there is no moment without
        either.
        """
        self._unindex(held)
        self._log.set_victim(op, held.ino)
        self._log.remove(held)
        self._listener.dropped(held)

    def _move_aside(self, held: Op, heir: Ino) -> None:
        """What the removal would remove goes to `.acpfs/kept`, complete, and is removed from there
        in its time.
        """
        self._unindex(held)
        suffix = b"-" + held.name
        name = b"%d" % held.seq + suffix[: NAME_BYTES_MAX - 20]
        self._log.turn_into_rename(held, self._kept_directory(held), name, heir)
        self._gate.yields_no_more(held)
        self._log.bring_back([held])
        self._log.let_go(held)

    def _kept_directory(self, held: Op) -> Ino:
        """On the same file system. The numbers are nobody else's: nodes have positive ones."""
        kept = self._lower.kept_path(self._tree.path_at(held.parent, held.name) or ())
        parent = next(
            (above for above in self._upwards(held.parent) if self._tree.path(above) == kept[:-3]),
            ROOT,
        )
        for name in kept[-3:]:
            ino = self._tree.node_at(parent, name)
            if ino is None:
                ino = next(
                    number
                    for number in map(Ino, itertools.count(-2, -1))
                    if number not in self._tree
                )
                self._tree.add(ino, parent, name)
            parent = ino
        return parent

    # -- what is held

    def _key(self, op: Op) -> Key | None:
        trace = self._former.trace(op.parent, op.name, op.ino)
        if trace is None:
            return None
        checkpoint = self._recogniser.of(b"/".join(trace.former), directory=op.kind is OpKind.RMDIR)
        return None if checkpoint is None else (checkpoint, trace.moved)

    def _index(self, op: Op) -> None:
        self._places[(op.parent, op.name)] = op
        self._nodes[op.ino] += 1
        self._above.update(self._upwards(op.parent))
        key = None if op.let_go else self._key(op)
        if key is None:
            self._behind[op.seq] = op
        else:
            self._keys[op.seq] = key
            self._held.setdefault(key, Guarded(*key, self._now)).add(op)

    def _unindex(self, op: Op) -> None:
        self._places.pop((op.parent, op.name), None)
        _take_off(self._nodes, op.ino)
        for directory in self._upwards(op.parent):
            _take_off(self._above, directory)
        self._behind.pop(op.seq, None)
        key = self._keys.pop(op.seq, None)
        if key is not None:
            held = self._held[key]
            del held.ops[op.seq]
            if not held.ops:
                del self._held[key]

    def _upwards(self, directory: Ino) -> list[Ino]:
        above = []
        while directory != ROOT:
            above.append(directory)
            places = self._tree.places(directory)
            if not places:
                break
            directory = places[0][0]
        return above

    def _lies_below(self, held: Guarded, directory: Ino) -> bool:
        return any(directory in self._upwards(op.parent) for op in held.ops.values())

    def _sort_anew(self) -> None:
        """Directories above have moved, or what is held itself: it is known by another path, or
        lies below others.

        Looks at all that is held, so never for a move of anything else: 500 files renamed while
        2,000 deletions were held took 14 s.
        """
        before = dict(self._held)
        for index in (self._held, self._keys, self._behind, self._places, self._nodes, self._above):
            index.clear()
        for op in self._log.all_aside():
            self._index(op)
        for key, held in self._held.items():
            if key in before:
                held.take_over(before[key])

    # -- told by the engine

    def found_kept(self, paths: Iterable[LowerPath]) -> None:
        """What lies in `.acpfs/kept` of this node: what no operation speaks of is left of a RAM
        tier that was lost.
        """
        mine = {
            op.new_name or op.name
            for op in [*self._log, *self._log.all_aside()]
            if op.parent < 0 or op.new_parent < 0
        }
        self._orphans = tuple(path for path in paths if path[-1] not in mine)

    def finishing(self, op: Op) -> None:
        """The operation is persisted, and about to leave the log."""
        self._superseded.discard(op.seq)
        if op.kind in _MOVING:
            self._renamed(op)
        elif op.kind in REMOVING and op.ino not in self._tree:
            self._former.forget(op.ino)

    def _renamed(self, op: Op) -> None:
        paths = self._note_move(op)
        if paths is None:
            return
        if op.let_go and op.new_parent < 0:  # moved aside: what it was to do is still to be done
            kind = OpKind(op.payload.partition(b" ")[0].decode())
            self._log.append(
                kind, op.ino, parent=op.new_parent, name=op.new_name, logged_at=op.logged_at
            )
            old, new = map(shown, paths)
            _log.warning(
                "an old checkpoint was made again before a newer one was persisted; it is kept",
                path=old,
                kept=new,
            )
        if any(ino in self._nodes or ino in self._above for ino in (op.ino, op.victim)):
            self._sort_anew()

    def _note_move(self, op: Op) -> tuple[LowerPath, LowerPath] | None:
        """Remember by what path something was known that lies elsewhere now (also when a killed
        worker had moved it, and not flushed).
        """
        trace = self._former.trace(op.parent, op.name)
        new = self._tree.path_at(op.new_parent, op.new_name)
        if trace is None or new is None:
            return None
        if op.let_go and op.new_parent < 0:
            self._former.remember(op.ino, trace.former)
        elif self._on:
            self._remember(op.ino, trace.former, new)
            if op.kind is OpKind.EXCHANGE:
                self._remember(op.victim, new, trace.former)
        return trace.former, new

    def _remember(self, ino: Ino, old: LowerPath, new: LowerPath) -> None:
        was, now = (self._recogniser.of(b"/".join(path), directory=True) for path in (old, new))
        if now is not None:
            self._former.forget(ino)
        elif was is not None and was.path == b"/".join(old):
            self._former.remember(ino, old)

    def noted(self, done: Iterable[Op]) -> None:
        """These operations are persisted: may be that a checkpoint is whole now."""
        if not self._held:
            return
        parents = {op.new_parent or op.parent for op in done if op.kind not in REMOVING}
        paths = [path for path in map(self._tree.path, parents) if path is not None]
        for held in self._held.values():
            if any(path[: len(held.save_dir)] == held.save_dir for path in paths):
                held.look_soon()
        self._bell.ring()

    def failed(self, op: Op, number: int | None) -> None:
        """An operation failed: is it for want of space?"""
        if self._held and self._space.failed(op, number, trio.current_time()):
            self._bell.ring()

    @property
    def is_settled(self) -> bool:
        """Whether the backing directory was looked at since the last change (or does not
        answer).
        """
        now = self._now()
        return all(
            held.asked_since is None or now - held.asked_since > PATIENCE_S
            for held in self._held.values()
        )

    async def decided(self) -> None:
        """Wait for that."""
        while not self.is_settled:  # noqa: ASYNC110 - the end of a look that hangs is no event
            await trio.sleep(DECIDED_LOOK_S)

    # -- looking

    async def run(self) -> None:
        """Look where there is something to look at, let go what may go. Until cancelled."""
        while True:
            with self._section():
                due = self._expire(trio.current_time())
                held = min(self._held.values(), key=lambda held: held.due, default=None)
                question = None
                if held is not None and held.due <= trio.current_time():
                    question = self._question(held)
                    due = trio.current_time() + PAUSE_S
                elif held is not None:
                    due = min(due, held.due)
            if held is None or question is None:
                await self._bell.heard(due)
                continue
            began = self._now()
            try:
                answer: Survey | OSError = await outcome(
                    self._pool.submit("survey", look, self._lower, self._recogniser, question)
                )
            except OSError as error:
                answer = error
            with self._section():
                held.looked(
                    trio.current_time(),
                    max(PAUSE_S, PAUSE_SHARE * (self._now() - began)),
                    POLL_S,
                )
                if isinstance(answer, OSError):
                    held.why = f"the backing directory does not say what it has: {answer.strerror}"
                elif self._tree.epoch % 2 or self._question(held) != question:
                    # it was moved meanwhile, or is being moved: what was seen may be something else
                    held.look_soon()
                elif held in self._held.values():
                    self._judge(held, answer)

    def _question(self, held: Guarded) -> Question | None:
        """None: something is just being renamed, its paths are not what they seem."""
        own: dict[LowerPath, LowerPath] = {}
        here = False
        parents = set[Ino]()
        parts = held.checkpoint.path.count(b"/") + 1
        for op in held.ops.values():
            if op.parent in parents:
                continue
            trace = self._former.trace(op.parent, op.name, op.ino)
            if trace is None or self._key(op) != (held.checkpoint, held.moved):
                return None
            below = len(trace.former) - parts
            root = trace.now[: len(trace.now) - below] if below > 0 else trace.now
            own[root] = trace.former[:parts]
            here = here or not trace.moved
            if below > 0:
                parents.add(op.parent)
        return Question(held.checkpoint, tuple(own.items()), held.save_dir, here)

    def _expire(self, now: float) -> float:
        """Let go whose time is up, or what takes the space of the next one; when to look again."""
        clock = self._log.clock.now()  # the deletions are stamped with it, and it does not step
        self._release(
            [held for held in self._held.values() if clock >= held.newest_at + self._time_s], "time"
        )
        if self._held and self._space.is_due(now):
            self._release([min(self._held.values(), key=lambda held: held.since)], "space")
        ends = [now + held.newest_at + self._time_s - clock for held in self._held.values()]
        return min([*ends, self._space.due]) if ends else math.inf

    def _judge(self, held: Guarded, survey: Survey) -> None:
        own = survey.own
        held.inventory = own
        if (
            not own.is_there
        ):  # others have removed it: there is nothing to keep, and nothing to wait for
            self._release_in_turn(held, "gone")
            return
        is_other = held.checkpoint.name.isdigit() and (
            own.size_bytes < NUMBER_BYTES_MIN or not own.has_state
        )
        if not own.size_bytes or is_other:
            self._release_in_turn(held, "small")
            return
        held.why = "no newer checkpoint lies beside it"
        lacks = {}
        for other in survey.others:
            if other.is_newer(own):
                lack = self._lack(held, other, own)
                if not lack:
                    self._release_in_turn(held, "newer")
                    return
                lacks[shown(other.checkpoint.name)] = lack
        if lacks:
            held.why = "not whole yet: " + "; ".join(
                f"{name}: {lack}" for name, lack in lacks.items()
            )

    def _lack(self, held: Guarded, other: Inventory, own: Inventory) -> str:
        lack = other.lacks(own)
        if lack and not (
            other.has_bytes_of(own) and held.quiet_s(other, trio.current_time()) >= QUIET_S
        ):
            return lack
        return "" if all(map(self._listener.is_settled, other.roots)) else "it is being written"

    # -- letting go

    def release(self, prefix: LowerPath) -> int:
        """Let go what is held at and below a path; how many checkpoints."""
        with self._section():
            chosen = [
                held
                for held in self._held.values()
                if any(self._is_below(op, prefix) for op in held.ops.values())
            ]
            self._release(chosen, "operator")
        return len(chosen)

    def _is_below(self, op: Op, prefix: LowerPath) -> bool:
        trace = self._former.trace(op.parent, op.name, op.ino)
        return trace is not None and trace.former[: len(prefix)] == prefix

    def _release_in_turn(self, held: Guarded, why: str) -> None:
        """Pointers at once, the rest when other members' pointers are gone, which they hold until
        they find the same.
        """
        if why == "newer":
            self._superseded.update(held.ops)
        first = [op for op in held.ops.values() if not self._gate.is_to_wait(op)]
        if len(first) == len(held.ops):
            self._release([held], why)
            return
        held.why = "other nodes have not removed their pointers to it yet"
        if first:
            self._bring_back(first)

    def _release(self, chosen: list[Guarded], why: str) -> None:
        if not chosen:
            return
        for held in chosen:
            self.released[why] += 1
            tell = {"space": _log.error, "time": _log.warning, "operator": _log.warning}.get(
                why, _log.info
            )
            tell(
                "held deletions are carried out",
                checkpoint=shown(held.checkpoint.path),
                why=why,
                operations=len(held.ops),
            )
        self._bring_back([op for held in chosen for op in held.ops.values()])

    def _bring_back(self, ops: list[Op]) -> None:
        for op in ops:
            self._log.let_go(op)
        behind = list(self._behind.values())
        for op in (*ops, *behind):
            self._unindex(op)
        self._log.bring_back([*ops, *behind])
        self._log.wake()

    # -- telling

    def statistics(self) -> GuardStatistics:
        """What `status`, the metrics and the tests see."""
        tell = partial(_told, time_s=self._time_s)
        told = [
            tell(held, moved=self._tree.path(moved))
            for (_checkpoint, moved), held in self._held.items()
        ]
        return GuardStatistics(
            tuple(sorted(told, key=lambda t: t.since)),
            len(self._log.all_aside()),
            dict(self.released),
            self._orphans,
        )


def _told(held: Guarded, *, moved: LowerPath | None, time_s: float) -> GuardedReport:
    inventory = held.inventory or Inventory(held.checkpoint)
    return GuardedReport(
        path=os.fsdecode(held.checkpoint.path),
        kept_as=os.fsdecode(b"/".join(moved or ())) or None,
        operations=len(held.ops),
        files=inventory.files,
        size=inventory.size_bytes,
        since=held.since,
        until=held.newest_at + time_s,
        why=held.why,
    )


def _take_off(counter: Counter[Ino], ino: Ino) -> None:
    """One less.

    `-=` between counters looks at the whole of both: n deletions that are let go would take n²
    steps.
    """
    counter[ino] -= 1
    if counter[ino] <= 0:
        del counter[ino]
