"""How a coordinator comes to command, and stops: it hears of others, asks for votes, and claims the
job where votes are two halves.

The rules are `election`'s, which is pure; here are their clock and their messages. Knows neither
sockets nor files: `Connected` posts, and `Witness` asks the directory. Everything runs in trio's
thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import trio

from acpfs.logger import get_logger
from acpfs.training.coordinator.commands import RUN, Command
from acpfs.training.coordinator.connections import Connected
from acpfs.training.coordinator.crew import Crew
from acpfs.training.coordinator.election import Standing, next_to_stand
from acpfs.training.coordinator.phases import Phases
from acpfs.training.coordinator.witness import Claimant, Witness
from acpfs.training.messages import Active, ExitStatus, Leave, Vote, Voted

_log = get_logger(__name__)
TURN_S = 0.5
"""Between two standbys that could ask for votes."""
LOOK_S = 0.1


class Elections:
    """Of one coordinator."""

    def __init__(
        self,
        standing: Standing,
        phases: Phases | Crew,
        connected: Connected,
        witness: Witness | None,
        carry_out: Callable[[Iterable[Command]], None],
        *,
        active_s: float,
    ) -> None:
        """`witness`: None where there is none. `carry_out`: what `phases` wants.

        `active_s`: see `Limits`.
        """
        self._standing = standing
        self._phases = phases
        self._connected = connected
        self._witness = witness
        self._carry_out = carry_out
        self._active_s = active_s
        self._heard_active = trio.current_time()
        self._active_is_gone = False
        """Its connection has ended: nobody waits for its silence."""

    def active(self) -> Active:
        """What this coordinator says while it commands."""
        return Active(self._standing.term, self._standing.number)

    def begin(self) -> None:
        """Be the job's first coordinator."""
        self._standing.begin()
        self._carry_out(self._phases.take_over(self._standing.term, trio.current_time()))

    def hears(self, term: int, coordinator: int | None) -> None:
        """A term was named; see `Standing.hears`."""
        deposed = self._standing.hears(term, coordinator)
        if coordinator is not None and self._standing.active == coordinator:
            self._heard_active = trio.current_time()
            self._active_is_gone = False
        if deposed:
            _log.warning("another coordinator commands", term=term, coordinator=coordinator)
            self._carry_out(self._phases.deposed(trio.current_time()))

    def disconnected(self, number: int) -> None:
        """The connection to this coordinator has ended."""
        self._active_is_gone = self._active_is_gone or number == self._standing.active

    def voted(self, rank: int, vote: Voted, generation: int) -> None:
        """A member's answer."""
        if self._standing.voted(rank, vote.term, vote.granted, generation, self._phases.world):
            self._take_over(trio.current_time())
        elif not self._standing.commands and rank in self._standing.votes:
            for word in self._phases.last_words:
                self._connected.to_members(word, [rank], self._standing.asked)

    async def run(self) -> None:
        """Ask for votes whenever nobody commands."""
        while True:
            slept_at = trio.current_time()
            await trio.sleep(LOOK_S)
            now = trio.current_time()
            if now - slept_at > LOOK_S + self._active_s / 2:
                # it stood still: what was said meanwhile waits in its sockets
                self._heard_active = now
            if self._standing.commands or not self._connected.members:
                self._heard_active = now
            elif (term := self._half(now)) is not None:
                await self._stand_with_claim(term)
            elif now - self._heard_active > self._patience_s:
                term = self._standing.ask()
                self._heard_active = now + random.uniform(-0.3, 0.3) - TURN_S  # noqa: S311
                self._active_is_gone = False
                _log.info("asks for votes", term=term)
                self._connected.to_members(Vote(term, self._standing.number))

    @property
    def _patience_s(self) -> float:
        """How long nobody may command until this one asks: those with lower numbers come first."""
        standing = [
            number
            for number in self._connected.others
            if number >= 0 and number != self._standing.active
        ]
        turns = next_to_stand(self._standing.number, standing)
        return (0.1 if self._active_is_gone else self._active_s) + turns * TURN_S

    def _take_over(self, now: float) -> None:
        _log.warning(
            "take-over",
            term=self._standing.term,
            votes=len(self._standing.votes),
            generation=self._standing.generation,
        )
        self._connected.to_all(self.active(), term=self._standing.term)
        self._carry_out(self._phases.take_over(self._standing.term, now, self._standing.generation))

    def _half(self, now: float) -> int | None:
        """The term in which all who can be heard have voted for this one, and they are half of the
        world and hold everything.

        None where they have had their last word: nobody has to go on.
        """
        voters = self._standing.votes.keys()
        if (
            self._witness is None
            or self._phases.last_words
            or not self._phases.heard(now) <= voters
            or not self._phases.could_save(voters)
        ):
            return None
        return self._standing.half_of(self._phases.world)

    async def _stand_with_claim(self, term: int) -> None:
        """Nobody has a majority where the job is in two equal halves: the claim decides which of
        them goes on.
        """
        assert self._witness is not None
        owner = await self._witness.owner(
            Claimant(self._standing.number, term, majority=False), RUN
        )
        if owner is None or owner.coordinator in self._connected.others:
            return  # the storage does not answer, or another one on this side is about to command
        if owner.coordinator == self._standing.number:
            if self._standing.claimed(term):
                self._take_over(trio.current_time())
        elif self._standing.asked == term:
            text = "the job is split, and the other half may save"
            self._connected.to_members(
                Leave(ExitStatus.OTHER_SIDE, text), self._standing.votes, term
            )
