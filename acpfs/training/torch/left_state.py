"""The state of a rank that had to end, as the process that takes its place sees it: bytes that
another process keeps (`memory_left`).

Of a rank whose main thread nothing brings out of C. No update is under way then and none begins, so
what it holds is whole: its shards, at the step that its marks say; gradients, where the next update
is ready; and the host state that it keeps, its own and another rank's.

`leave_state` is called by the member's thread while the main thread waits; `LeftState` belongs to
the main thread of the next process.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from acpfs.errors import RefusedError
from acpfs.logger import get_logger
from acpfs.training.host_state import HostState, Taken
from acpfs.training.marks import Marks
from acpfs.training.memory_left import GoneError, Left, Span, leave
from acpfs.training.messages import Phase, Shard, Stopped
from acpfs.training.torch.end_mark import ChangedError, EndMark
from acpfs.training.torch.hooks import UpdateHooks
from acpfs.training.torch.transfer import Contents, Outline, Outlines, filled, flat, outline

log = get_logger(__name__)

if TYPE_CHECKING:
    from acpfs.training.torch.holding import Holding


LEFT_VERSION = 1
"""Of what is left. A pickle of classes is read by the same form alone, and no other is tried."""
_VERSION = struct.Struct("<Q")


@dataclass
class State:
    """What the loop of one generation works on."""

    held: Holding
    host: HostState
    hooks: UpdateHooks
    end: EndMark
    stopped: Stopped | None = None
    """Where it was when it was stopped; None: where the marks are."""

    @property
    def holders(self) -> Mapping[Shard, tuple[int, ...]]:
        return self.held.layout.holders

    @property
    def steps(self) -> tuple[int, ...]:
        """Whose end the host state can be brought to."""
        return self.host.steps

    def taken(self, step: int) -> Taken:
        return self.host.taken(step)

    def contents(self, shard: Shard) -> Contents:
        return self.held.contents(shard)

    def come(self, step: int, fresh: State, marks: Marks) -> None:
        """Do the update that is ready, alone."""
        marks.stand_ready(step)  # an earlier try to begin elsewhere may have moved the mark
        self.hooks.finish_alone()
        self.hooks.wait_done()
        self.stopped = Stopped(step, step, Phase.COMPUTING)

    def stop(self, now: Stopped, *, damaged: bool) -> None:
        """The generation is over, and the marks are there.

        `damaged`: nothing in this process's memory is what it was.
        """
        self.hooks.remove()
        was = self.stopped or now
        if (
            now.phase is Phase.UPDATING
        ):  # also one that it was to do alone, to meet the others: it is torn
            was = replace(was, phase=Phase.UPDATING)
        elif (
            was.phase is Phase.READY and now.done == was.ready
        ):  # it has done that one, and did not come to say so
            was = replace(was, done=was.ready, phase=Phase.COMPUTING)
        if damaged:
            was = replace(was, damaged=tuple(self.holders))
        elif was.phase is not Phase.UPDATING:
            # Also of one that is ready: the others may meet at the step before.
            was = replace(was, damaged=tuple(sorted({*was.damaged, *self.end.torn()})))
        self.stopped = was

    def bring(self) -> None:
        """Parameters as the last update has left them; what cannot be is damaged, and `stop` has
        said so.
        """
        with suppress(ChangedError):
            self.end.bring()

    def release(self) -> None:
        """Another state has taken its place."""


@dataclass(frozen=True)
class _Head:
    """All but the bytes of tensors; sent first."""

    stopped: Stopped
    lineage: int
    holders: Mapping[Shard, tuple[int, ...]]
    host: Mapping[int, Taken]
    kept: Mapping[int, bytes]
    shards: Mapping[Shard, Outlines]
    gradients: Outlines


def leave_state(
    name: str, state: State, marks: Marks, lineage: int, kept: Mapping[int, bytes]
) -> int:
    """Leave it to whoever asks at that name; how many bytes.

    Behind a STOP, and while nothing moves in it.

    Raises:
        RefusedError: an update is under way, or it is in the memory of a device.
        ChangedError: parameters were changed behind their last update, and no copy was taken.
        OSError: no process can be made that would keep it.
    """
    now = marks.now
    stopped = state.stopped or Stopped(now.done, now.ready, now.phase)
    if (
        stopped.phase is Phase.READY and now.done == stopped.ready
    ):  # it has done that update alone, and did not come to say so
        stopped = replace(stopped, done=stopped.ready, phase=Phase.COMPUTING)
    if not marks.held or marks.updating or stopped.phase is Phase.UPDATING:
        raise RefusedError("an update is under way: what this rank holds is of no step")
    if stopped.phase is Phase.READY and state.end.changed():
        raise RefusedError("parameters were changed behind their last update")
    if stopped.phase is not Phase.READY:
        state.end.bring()
    gradients = state.held.gradients() if stopped.phase is Phase.READY else {}
    if gradients is None:
        stopped = replace(stopped, ready=stopped.done, phase=Phase.COMPUTING)
        gradients = {}
    shards = {shard: state.contents(shard) for shard in state.holders}
    held = [one for contents in (*shards.values(), gradients) for one in flat(contents)]
    if any(one.device.type != "cpu" for one in held):
        raise RefusedError("a device's memory ends with its process")
    host = {step: state.taken(step) for step in state.steps}
    outlines = {shard: outline(contents) for shard, contents in shards.items()}
    head = _Head(stopped, lineage, state.holders, host, dict(kept), outlines, outline(gradients))
    spans = [Span(one.data_ptr(), one.numel()) for one in held]
    leave(name, _VERSION.pack(LEFT_VERSION) + pickle.dumps(head), spans)
    return sum(span.size for span in spans)


def left_state(name: str) -> LeftState | None:
    """What the process before this one has left, if anything that can be read."""
    left = Left.ask(name)
    if left is None:
        return None
    (version,) = _VERSION.unpack_from(left.head)
    if version != LEFT_VERSION:
        log.warning(
            "what the process before this one has left is of another acpfs, and is not taken",
            version=version,
            known=LEFT_VERSION,
        )
        left.close()
        return None
    # of this user's own process: `Left` has looked
    return LeftState(left, pickle.loads(left.head[_VERSION.size :]))  # noqa: S301


class LeftState:
    """In the place of a `State`: nothing of it is here before it is wanted."""

    def __init__(self, left: Left, head: _Head) -> None:
        self._left = left
        self._head = head
        self.stopped: Stopped | None = head.stopped
        self.lineage = head.lineage
        self.kept = head.kept
        self.holders = head.holders
        self._first: dict[Shard, int] = {}
        """The number of a shard's first span; gradients are behind all of them."""
        self._behind = 0
        for shard, outlines in head.shards.items():
            self._first[shard] = self._behind
            self._behind += _spans(outlines)
        self._fresh: State | None = None
        """Where it was brought to a step that nobody has left."""

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted(self._head.host))

    def taken(self, step: int) -> Taken:
        return self._head.host[step]

    def contents(self, shard: Shard) -> Contents:
        """Of a shard.

        Raises:
            GoneError: who kept it has ended; the next generation begins without.
        """
        if self._fresh is not None:
            return self._fresh.contents(shard)
        return self._read(self._head.shards[shard], self._first[shard])

    def _read(self, outlines: Outlines, first: int) -> Contents:
        numbers = count(first)
        try:
            return filled(
                outlines, lambda room: self._left.read(next(numbers), memoryview(room.numpy()))
            )
        except GoneError:
            self.stopped = replace(self._head.stopped, damaged=tuple(self.holders))
            raise

    def come(self, step: int, fresh: State, marks: Marks) -> None:
        """Do the update that was ready, in the state that takes its place; what was left stays as
        it is, for the case that this fails.
        """
        for shard in self.holders:
            fresh.held.fill(self.contents(shard))
        fresh.held.fill_gradients(self._read(self._head.gradients, self._behind))
        fresh.host.give(self.taken(step).values)
        marks.stand_ready(step)
        fresh.hooks.finish_alone()
        fresh.hooks.wait_done()
        fresh.held.fill_gradients({})
        self._fresh = fresh

    def stop(self, now: Stopped, *, damaged: bool) -> None:
        """The generation is over, and with it what was made of this in it."""
        self._fresh = None

    def bring(self) -> None:
        """It was left as the last update had left it."""

    def release(self) -> None:
        """Another state has taken its place."""
        self._left.taken()


def _spans(outlines: Outlines) -> int:
    """So many tensors with bytes are in it."""
    return sum(
        isinstance(one, Outline) and 0 not in one.shape
        for values in outlines.values()
        for one in values.values()
    )
