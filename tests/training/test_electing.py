"""When a standby asks for votes, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from acpfs.training.coordinator.connections import Connected, Connection
from acpfs.training.coordinator.crew import Crew
from acpfs.training.coordinator.electing import Elections
from acpfs.training.coordinator.election import FIRST_TERM, Standing
from acpfs.training.coordinator.limits import Limits
from acpfs.training.messages import Message, Vote, Voted

clause = pytest.mark.clause
LIMITS = Limits()
SAYS_S = 0.5
"""How often whoever commands says so."""


class Asked(Connected):
    """Members that are connected to another coordinator: none votes."""

    elections: Elections

    def __init__(self, crew: Crew) -> None:
        super().__init__("job", 1, crew)
        self.members = {0: cast("Connection", None)}
        self.terms: list[int] = []

    def to_members(
        self, message: Message, ranks: Iterable[int] | None = None, term: int | None = None
    ) -> None:
        assert isinstance(message, Vote)
        self.terms.append(message.term)
        self.elections.voted(0, Voted(message.term, granted=False), 0)


async def asked(scenario: Callable[[Elections], Awaitable[None]]) -> list[int]:
    """The terms for which a standby asks until the scenario is over."""
    crew = Crew("job", LIMITS)
    connected = Asked(crew)
    elections = Elections(
        Standing(1), crew, connected, None, lambda _commands: None, active_s=LIMITS.active_s
    )
    connected.elections = elections
    async with trio.open_nursery() as nursery:
        nursery.start_soon(elections.run)
        await scenario(elections)
        nursery.cancel_scope.cancel()
    return connected.terms


async def hear_active(elections: Elections, for_s: float) -> None:
    for _ in range(math.ceil(for_s / SAYS_S)):
        elections.hears(FIRST_TERM, 0)
        await trio.sleep(SAYS_S)


@clause("T50")
def test_who_asked_once_asks_no_more_while_another_one_commands() -> None:
    async def silent_once(elections: Elections) -> None:
        await hear_active(elections, 5.0)
        await trio.sleep(2 * LIMITS.active_s)
        await hear_active(elections, 60.0)

    terms = trio.run(asked, silent_once, clock=MockClock(autojump_threshold=0))
    assert 1 <= len(terms) <= 2


@clause("T50")
def test_who_stood_still_itself_does_not_ask() -> None:
    """What was said meanwhile waits in its sockets."""

    async def stands_still(elections: Elections) -> None:
        clock = cast("MockClock", trio.lowlevel.current_clock())
        await hear_active(elections, 5.0)
        clock.jump(10 * LIMITS.active_s)
        await trio.testing.wait_all_tasks_blocked()
        await hear_active(elections, 5.0)

    assert trio.run(asked, stands_still, clock=MockClock(autojump_threshold=0)) == []
