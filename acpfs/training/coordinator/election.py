"""Which coordinator is active. Pure: what arrived goes in, what to send comes out.

A *term* has at most one active coordinator: it begins with more than half of the world's votes, or
with exactly half of them and the witness's claim on the job, which one coordinator can have; and a
member votes once per term. It votes only when its own connection to the active one is gone, so an
active coordinator that members can reach stays. A member obeys no term lower than the highest that
it has voted in or heard of. The first coordinator begins with term 1 without a vote: nobody else
does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

FIRST_TERM = 1


@dataclass
class Ballot:
    """A member's side; also what the process that trains keeps."""

    term: int = 0
    """The highest that this member has voted in or obeyed."""
    active: int | None = None
    """The coordinator of that term, where it is known."""
    connected: bool = False
    """Whether this member's connection to it stands."""

    def obeys(self, term: int) -> bool:
        """Whether a command of this term is to be carried out. A higher one is news of a
        take-over.
        """
        return term >= self.term and term > 0

    def hears(self, term: int, coordinator: int) -> bool:
        """ACTIVE, or a command, came over the connection to this coordinator.

        False: it is out of date.
        """
        if not self.obeys(term) or (term == self.term and self.active not in (None, coordinator)):
            return False
        self.term = term
        self.active = coordinator
        self.connected = True
        return True

    def disconnected(self, coordinator: int) -> None:
        """The connection to this coordinator is gone."""
        if coordinator == self.active:
            self.connected = False

    def vote(self, term: int) -> bool:
        """Whether to vote for whoever asks in this term; it is not asked twice."""
        if term <= self.term or self.connected:
            return False
        self.term = term
        self.active = None
        return True


@dataclass
class Standing:
    """A coordinator's side."""

    number: int
    term: int = 0
    """The highest that it has heard of."""
    active: int | None = None
    asked: int | None = None
    """The term for which this one has asked for votes."""
    led: int = 0
    """The highest term of which a coordinator has said that it commands in it."""
    votes: dict[int, int] = field(default_factory=dict)
    """Rank → its generation, of those who voted for this one in `asked`."""

    @property
    def commands(self) -> bool:
        """Whether this is the active coordinator, as far as it knows."""
        return self.active == self.number

    def begin(self) -> None:
        """Be the job's first coordinator."""
        self.term = FIRST_TERM
        self.active = self.number

    def hears(self, term: int, coordinator: int | None) -> bool:
        """A term was named: by an active coordinator, or by a member (`coordinator` None).

        Whether this one is active no longer.
        """
        was = self.commands
        leads = coordinator is not None and term >= self.led
        self.led = term if leads else self.led
        if term > self.term:
            self.term = term
            self.active = coordinator
            self.asked = None
        elif term == self.term and coordinator is not None and self.asked != term and not was:
            self.active = coordinator
        elif leads and self.asked == self.term and not self.votes and not was:
            # Asked in vain: nobody obeys a higher term for that. Its own stays, and the next one
            # that it asks for is higher.
            self.active = coordinator
        return was and not self.commands

    def ask(self) -> int:
        """Nobody commands: the term to ask votes for. Each call asks for a higher one."""
        self.term = max(self.term, FIRST_TERM) + 1
        self.active = None
        self.asked = self.term
        self.votes = {}
        return self.term

    def voted(self, rank: int, term: int, granted: bool, generation: int, world: int) -> bool:
        """A member's answer. Whether this coordinator is active with it; once per term."""
        if self.commands or term != self.asked or not granted:
            return False
        self.votes[rank] = generation
        if 2 * len(self.votes) <= world:
            return False
        self.active = self.number
        return True

    def half_of(self, world: int) -> int | None:
        """The term in which exactly half of the world has voted for this one, which then needs the
        claim.
        """
        return (
            self.asked
            if not self.commands and self.votes and 2 * len(self.votes) == world
            else None
        )

    def claimed(self, term: int) -> bool:
        """The claim is this one's.

        Whether it is active with it: not where votes for another term were asked for meanwhile.
        """
        if self.commands or self.asked != term:
            return False
        self.active = self.number
        return True

    @property
    def generation(self) -> int:
        """The newest that voters know."""
        return max(self.votes.values(), default=0)


def next_to_stand(number: int, known: Iterable[int]) -> int:
    """Place of a standby in the queue: it waits so many turns longer than the first before it asks,
    so that two do not split the votes.
    """
    return sum(other < number for other in known)
