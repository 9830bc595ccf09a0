"""From where each rank takes its state when all have met again: this process, a replica, the mount,
whichever is newest. Pure.

Every rank has told all others what it has, and each decides the same from the same reports. Where
survivors meet is `decision`'s answer; this module adds who is in want of what, and who gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from acpfs.training.decision import Cover, Layout, Meeting, NoCover, cover, keepers, meeting
from acpfs.training.messages import Gate, Shard, Stopped

NAME = "step-{step}"
Tag = tuple[int, int]
"""Of a copy of all shards: the lineage in which it was taken, and its step."""


class Origin(Enum):
    """Of the state with which a generation begins."""

    MEMORY = "memory"
    COPIES = "copies"
    """Those of some steps ago, in the memory of each rank and of its buddy."""
    MOUNT = "mount"
    BEGINNING = "beginning"
    """As the loop has just built it."""


@dataclass(frozen=True, slots=True)
class Having:
    """What a rank has."""

    holders: Mapping[Shard, tuple[int, ...]]
    """Of the model that it has just built."""
    stopped: Stopped | None = None
    """Where its process was when it was stopped; None: it is new, or has nothing left."""
    host: tuple[int, ...] = ()
    """Steps whose end it can bring its host state to."""
    kept: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Rank → steps of its host state that this one keeps for it."""
    mount: int | None = None
    """Step of the newest checkpoint that it sees."""
    lineage: int = 0
    """The generation in which all had to begin elsewhere than behind their last step, as far as it
    knows.
    """
    copies: Mapping[Tag, tuple[int, ...]] = field(default_factory=dict)
    """Ranks of which it has a whole copy of all that they held then; its own is one of them."""
    named: int = 0
    """Step of the newest checkpoint that this process knows of in the mount."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What all ranks do."""

    origin: Origin
    step: int
    coming: frozenset[int] = frozenset()
    """They do update `step` alone first."""
    givers: Mapping[Shard, int] = field(default_factory=dict)
    wanting: Mapping[Shard, tuple[int, ...]] = field(default_factory=dict)
    """Who has to be given a shard."""
    hosts: Mapping[int, int | None] = field(default_factory=dict)
    """Rank → who has its host state; None: nobody."""
    lineage: int = 0
    """Of that state."""
    tag: Tag | None = None
    """The newest copy that is whole, whatever all begin with; None: there is none."""
    parcels: Mapping[int, Mapping[Shard, tuple[int, int]]] = field(default_factory=dict)
    """With `COPIES`: for each rank and shard who gives it, and out of whose copy."""


def sources(having: Mapping[int, Having]) -> Sources:
    """The decision.

    What is of an older lineage than somebody has is void: the job has done those steps again since.
    """
    lineage = max(one.lineage for one in having.values())
    having = {
        rank: one
        if one.lineage == lineage
        else Having(one.holders, mount=one.mount, copies=one.copies, named=one.named)
        for rank, one in having.items()
    }
    holders = {shard: ranks for one in having.values() for shard, ranks in one.holders.items()}
    layout = Layout(len(having), Gate.EXPLICIT, NAME, 0, holders, dict.fromkeys(having, ""))
    stopped = {rank: one.stopped for rank, one in having.items() if one.stopped is not None}
    found = meeting(layout, stopped)
    seen = [one.mount for one in having.values()]
    saved = (
        min((step for step in seen if step is not None), default=None) if None not in seen else None
    )
    copied = _copied(having)
    if isinstance(found, NoCover):
        if copied is not None and (saved is None or saved <= copied.step):
            return copied
        return Sources(Origin.BEGINNING, 0) if saved is None else Sources(Origin.MOUNT, saved)
    if saved is not None and saved > found.step:
        return Sources(Origin.MOUNT, saved)
    whole = found.there | found.coming
    givers = cover(layout, whole, found.torn)
    assert not isinstance(givers, NoCover), "survivors meet where they have a cover"
    return Sources(
        Origin.MEMORY,
        found.step,
        found.coming,
        givers,
        _wanting(layout, found, givers),
        {rank: _host(rank, found.step, having) for rank in having},
        lineage,
        None if copied is None else copied.tag,
    )


def _copied(having: Mapping[int, Having]) -> Sources | None:
    """The newest copy of which each rank's shards are somewhere.

    Its lineage may be an older one: all have gone back to it then, or it is what all would have
    gone back to. A copy that is not whole is no copy, so two of one tag are the same.
    """
    for tag in sorted({tag for one in having.values() for tag in one.copies}, reverse=True):
        kept = keepers({rank: one.copies.get(tag, ()) for rank, one in having.items()})
        given = {rank: _parcels(rank, one, kept) for rank, one in having.items()}
        if all(given[rank].keys() == one.holders.keys() for rank, one in having.items()):
            return Sources(
                Origin.COPIES,
                tag[1],
                hosts={rank: kept.get(rank) for rank in having},
                tag=tag,
                parcels=given,
            )
    return None


def _parcels(rank: int, one: Having, kept: Mapping[int, int]) -> Mapping[Shard, tuple[int, int]]:
    """Of a rank's shards those that somebody has: out of its own copy, or out of another holder's.

    `kept`: whose copy → who has it.
    """
    found = {}
    for shard, holders in one.holders.items():
        whose = next((holder for holder in (rank, *holders) if holder in kept), None)
        if whose is not None:
            found[shard] = (kept[whose], whose)
    return found


def _wanting(layout: Layout, found: Meeting, givers: Cover) -> Mapping[Shard, tuple[int, ...]]:
    whole = found.there | found.coming
    wanting = {
        shard: tuple(
            rank
            for rank in layout.holders[shard]
            if rank not in whole or (rank, shard) in found.torn
        )
        for shard in givers
    }
    return {shard: ranks for shard, ranks in wanting.items() if ranks}


def _host(rank: int, step: int, having: Mapping[int, Having]) -> int | None:
    if step in having[rank].host:
        return rank
    return next(
        (other for other, one in sorted(having.items()) if step in one.kept.get(rank, ())), None
    )
