"""May somebody take over the log of a member that still begins commits? Every interleaving, with
clocks that run apart by at most D.

A stops by itself L after the beginning of its last record that it knows to be written. B claims
when it has looked, found the record unchanged for more than T by its own clock, and A does not
answer on the network. The decisions are `acpfs.writeback.adopting.states`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from acpfs.writeback.adopting import states
from acpfs.writeback.adopting.states import HolderState, OriginEvent, OriginState, Turn


class Record(NamedTuple):
    """That A writes."""

    age: int
    """Since that began, by A's clock."""
    written: bool = False


class Moment(NamedTuple):
    """Of both."""

    renewed: int = 0
    """So long ago, by A's clock."""
    record: Record | None = None
    is_new: bool = False
    """B has not seen the last change yet."""
    unchanged: int = 0
    """So long B has seen none, by its clock."""
    apart: int = 0
    """So much the clocks may still run apart."""
    link: bool = True
    mode: OriginState = OriginState.LIVE
    alive: bool = True


@dataclass(frozen=True)
class Times:
    """All in the same unit."""

    lease: int
    timeout: int
    drift: int
    asks: bool = True
    """B asks A before it claims."""

    def steps(self, m: Moment) -> Iterator[Moment]:
        """All that may come next."""
        mode = m.mode
        if m.alive and mode is OriginState.LIVE and states.is_isolated(m.renewed, 0, self.lease):
            mode = states.origin_after(mode, OriginEvent.LEASE_RAN_OUT)
        if mode is not m.mode:
            yield m._replace(mode=mode)
        else:
            yield self._later(m, 1, 1, 0)
            if m.apart:
                yield self._later(m, 0, 1, 1)
                yield self._later(m, 1, 0, 1)
            if m.alive and m.record is None:
                yield m._replace(record=Record(0))
        if m.record is not None:
            yield from self._written(m, m.record)
        if m.is_new:
            yield m._replace(is_new=False, unchanged=0)
        yield m._replace(link=not m.link)
        if m.alive:
            yield m._replace(alive=False)

    def _later(self, m: Moment, a: int, b: int, used: int) -> Moment:
        record = m.record
        if record is not None:
            record = record._replace(age=min(record.age + a, self.lease + 2))
        return m._replace(
            renewed=min(m.renewed + a, self.lease + 2),
            record=record,
            unchanged=min(m.unchanged + b, self.timeout + 2),
            apart=m.apart - used,
        )

    def _written(self, m: Moment, record: Record) -> Iterator[Moment]:
        if not record.written:
            yield m._replace(record=record._replace(written=True), is_new=True)  # also after death
        elif m.alive:  # the answer comes, however late
            renewed = -int(states.renewed_at(-record.age, 0))
            mode = m.mode
            if not states.is_isolated(0, -renewed, self.lease):
                mode = states.origin_after(mode, OriginEvent.RENEWED)
            yield m._replace(renewed=renewed, record=None, mode=mode)

    def is_wrong(self, m: Moment) -> bool:
        """B claims while A begins commits."""
        claims = not m.is_new and states.may_claim(
            HolderState.HOLDING,
            silent=states.is_silent(m.unchanged, self.timeout),
            answers=self.asks and m.alive and m.link,
            has_left=False,
        )
        return claims and m.alive and states.turn(m.mode, 0, (), 0) is Turn.BEGIN

    def walk(self) -> tuple[int, Moment | None]:
        """How many moments there are, and one that is wrong."""
        first = Moment(apart=self.drift)
        seen = {first}
        todo = deque([first])
        while todo:
            m = todo.popleft()
            if self.is_wrong(m):
                return len(seen), m
            for r in self.steps(m):
                if r not in seen:
                    seen.add(r)
                    todo.append(r)
        return len(seen), None
