"""What survivors do: at which step they meet, and who writes what.

Pure: layout, reports and losses in, decisions out.

Let update n+1 be *begun* by a rank when it leaves the gate for it, and *done* when its local part
is complete. Training is synchronous; an update needs the rank's own state and its reduced gradients
only; damage is reported; with gate `none` every rank holds every shard.

1. Nobody begins n+1 before all ranks are ready(n+1): the gate is a collective that no rank leaves
   before all have entered. So ranks differ by at most one update: to begin n+2, all must be
   ready(n+2), hence done(n+1).
2. S = max over survivors of `done`; one that is updating is waited for, and needs nobody. If S =
   n+1, somebody began n+1, so every survivor is ready(n+1) or done(n+1), has its gradients, and can
   do its update alone. If S = n, no survivor has begun n+1. Either way all meet at S, whoever died.
   With gate `none` some stay behind; the others hold everything.
3. A parked rank's marks cannot move. One whose update was torn reports so, or still says
   `updating`: nothing of it is in a cover.
4. A cover has a live holder at S for every shard, or nothing is saved. Copies with different
   digests are told; of three or more the majority is taken.

Reports that contradict this (an optimizer that communicates inside its update) make a rank stay
behind, never a wrong cover; where no cover at S is left then, S − 1 is tried with those who are
there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from acpfs.errors import AcpfsError
from acpfs.training.messages import Gate, GateResult, Hello, Phase, Shard, Stopped

Held = tuple[int, Shard]
"""A rank's copy of a shard."""


class LayoutError(AcpfsError):
    """Ranks do not agree about who holds what; there is no protection."""


@dataclass(frozen=True)
class Layout:
    """Which rank holds which shard. Made by `layout_of`, which checks it."""

    world: int
    gate: Gate
    name: str
    begun: int
    holders: Mapping[Shard, tuple[int, ...]]
    """In order of ranks."""
    nodes: Mapping[int, str]

    @cached_property
    def shards(self) -> Mapping[int, frozenset[Shard]]:
        """Rank → what it holds."""
        found: dict[int, set[Shard]] = {rank: set() for rank in range(self.world)}
        for shard, ranks in self.holders.items():
            for rank in ranks:
                found[rank].add(shard)
        return {rank: frozenset(shards) for rank, shards in found.items()}


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where survivors meet."""

    step: int
    there: frozenset[int]
    """At `step` already."""
    coming: frozenset[int]
    """They do update `step` alone."""
    behind: frozenset[int]
    """They can not be at `step`; in no cover."""
    gate: GateResult | None
    """What those who come need where the gate is implicit."""
    torn: frozenset[Held]
    """Copies that are damaged."""


@dataclass(frozen=True, slots=True)
class NoCover:
    """Nobody who lives has these shards at one step."""

    missing: tuple[Shard, ...]


Cover = Mapping[Shard, int]


def layout_of(hellos: Mapping[int, Hello]) -> Layout:
    """The layout that all ranks agree about.

    Raises:
        LayoutError: they do not, or one is missing.
    """
    first = hellos[min(hellos)]
    if missing := sorted(set(range(first.world)) - hellos.keys()):
        raise LayoutError(f"ranks {_listed(missing)} have not registered")
    holders: dict[Shard, tuple[int, ...]] = {}
    for rank, hello in hellos.items():
        for name in ("world", "gate", "name", "begun"):
            if getattr(hello, name) != getattr(first, name):
                raise LayoutError(
                    f"rank {rank} says {name} = {getattr(hello, name)}, rank {first.rank} says "
                    f"{getattr(first, name)}"
                )
        for shard, ranks in hello.holders.items():
            known = holders.setdefault(shard, tuple(sorted(ranks)))
            if known != tuple(sorted(ranks)):
                raise LayoutError(
                    f"ranks {known[0]} and {rank} do not agree about who holds {shard}"
                )
    for shard, ranks in holders.items():
        if without := [
            rank for rank in ranks if rank not in hellos or shard not in hellos[rank].holders
        ]:
            raise LayoutError(
                f"ranks {_listed(without)} are said to hold {shard}, and do not say so"
            )
    if first.gate is Gate.NONE and any(len(ranks) < first.world for ranks in holders.values()):
        raise LayoutError("without a gate every rank must hold everything")
    if not holders:
        raise LayoutError("no rank holds anything")
    return Layout(
        first.world,
        first.gate,
        first.name,
        first.begun,
        holders,
        {rank: hello.node for rank, hello in hellos.items()},
    )


def meeting(
    layout: Layout, reports: Mapping[int, Stopped], unable: frozenset[int] = frozenset()
) -> Meeting | NoCover:
    """Where the ranks that reported can meet, such that a cover is left.

    Those who are lost have no report here.

    `unable`: ranks that could not write; they meet, and are in no cover.
    """
    if not reports:
        return NoCover(tuple(sorted(layout.holders)))
    torn = frozenset(
        (rank, shard) for rank, report in reports.items() for shard in _torn(layout, rank, report)
    )
    newest = max(report.done for report in reports.values())
    first: NoCover | None = None
    for step in (newest, newest - 1):
        found = _meeting_at(layout, reports, step, torn)
        chosen = cover(layout, (found.there | found.coming) - unable, torn)
        if not isinstance(chosen, NoCover):
            return found
        first = first or chosen
        if step == 0:
            break
    assert first is not None
    return first


def _torn(layout: Layout, rank: int, report: Stopped) -> Iterable[Shard]:
    return layout.shards[rank] if report.phase is Phase.UPDATING else report.damaged


def _meeting_at(
    layout: Layout, reports: Mapping[int, Stopped], step: int, torn: frozenset[Held]
) -> Meeting:
    gate = next(
        (
            report.gate
            for report in reports.values()
            if report.gate is not None and report.gate.step == step
        ),
        None,
    )
    there = frozenset(rank for rank, report in reports.items() if report.done == step)
    passed = layout.gate is Gate.EXPLICIT or (layout.gate is Gate.IMPLICIT and gate is not None)
    coming = frozenset(
        rank
        for rank, report in reports.items()
        if passed
        and (report.done, report.ready, report.phase) == (step - 1, step, Phase.READY)
        and not layout.shards[rank] <= _of(torn, rank)
    )
    return Meeting(
        step, there, coming, frozenset(reports) - there - coming, gate if coming else None, torn
    )


def _of(held: frozenset[Held], rank: int) -> set[Shard]:
    return {shard for holder, shard in held if holder == rank}


def cover(
    layout: Layout, able: Iterable[int], without: frozenset[Held] = frozenset()
) -> Cover | NoCover:
    """One able holder for each shard, none from `without`; nodes and ranks have equal shares as far
    as that goes.

    Shards with the fewest holders choose first; of equal holders the lowest rank is taken, so that
    the same reports give the same cover.
    """
    able = frozenset(able)
    choices = {
        shard: [rank for rank in ranks if rank in able and (rank, shard) not in without]
        for shard, ranks in layout.holders.items()
    }
    if missing := sorted(shard for shard, ranks in choices.items() if not ranks):
        return NoCover(tuple(missing))
    by_node: Counter[str] = Counter()
    by_rank: Counter[int] = Counter()
    chosen = {}
    for shard in sorted(choices, key=lambda shard: (len(choices[shard]), shard)):
        rank = min(
            choices[shard], key=lambda rank: (by_node[layout.nodes[rank]], by_rank[rank], rank)
        )
        chosen[shard] = rank
        by_node[layout.nodes[rank]] += 1
        by_rank[rank] += 1
    return chosen


@dataclass(frozen=True, slots=True)
class Copied:
    """Where survivors go back to, when what some held is lost."""

    step: int
    cover: Cover
    """Shard → who writes it."""
    whose: Mapping[Shard, int]
    """Shard → out of which rank's copy."""


def keepers(copies: Mapping[int, Iterable[int]]) -> Mapping[int, int]:
    """Rank → who has its copy: itself, if it has.

    `copies`: rank → whose it has.
    """
    found: dict[int, int] = {}
    for rank, whose in sorted(copies.items()):
        for one in whose:
            if one == rank or one not in found:
                found[one] = rank
    return found


def newest_copy(
    layout: Layout, reports: Mapping[int, Stopped], unable: frozenset[int] = frozenset()
) -> Copied | None:
    """The newest step of which each shard is in a copy that somebody has who can write.

    A holder that lives writes its own, where it can.
    """
    able = {rank: report for rank, report in reports.items() if rank not in unable}
    for step in sorted({step for report in able.values() for step in report.copies}, reverse=True):
        kept = keepers({rank: report.copies.get(step, ()) for rank, report in able.items()})
        whose = {
            shard: min(found, key=lambda rank: (kept[rank] != rank, rank))
            for shard, ranks in layout.holders.items()
            if (found := [rank for rank in ranks if rank in kept])
        }
        if whose.keys() == layout.holders.keys():
            return Copied(step, {shard: kept[rank] for shard, rank in whose.items()}, whose)
    return None


def differing(
    layout: Layout, digests: Mapping[int, Mapping[Shard, str]]
) -> Mapping[Shard, Mapping[int, str]]:
    """Shards whose holders at S have different digests: rank → digest.

    A holder that gave none is not compared.
    """
    found = {}
    for shard, ranks in layout.holders.items():
        given = {rank: digests[rank][shard] for rank in ranks if shard in digests.get(rank, {})}
        if len(set(given.values())) > 1:
            found[shard] = given
    return found


def outvoted(different: Mapping[Shard, Mapping[int, str]]) -> frozenset[Held]:
    """Copies that more than half of their shard's copies contradict.

    With two copies, or no majority: none.
    """
    wrong = set()
    for shard, given in different.items():
        ((digest, count),) = Counter(given.values()).most_common(1)
        if 2 * count > len(given):
            wrong |= {(rank, shard) for rank, other in given.items() if other != digest}
    return frozenset(wrong)


def _listed(ranks: Iterable[int]) -> str:
    shown = [str(rank) for rank in sorted(ranks)]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
