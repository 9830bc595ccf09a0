"""The active coordinator of a job whose ranks are replaced, without I/O: what happened goes in,
commands come out (states: `states`).

It decides who runs when, and nothing about tensors: a generation begins with RESUME when each rank
has a process and all are parked; in it the ranks find out by themselves who has which state. Every
STOP begins the next generation, so what a member says about an older one is void. There is no log:
a coordinator that takes over goes on where all ranks say by their beats that they run, and
otherwise stops them and begins again. That all is done it knows from those who were told so and
left. Interface and clock are those of `phases`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from acpfs.training.coordinator.commands import Command, Commands, Finish, Record, Tell
from acpfs.training.coordinator.giving_up import CAUSES, Cause, GivingUp
from acpfs.training.coordinator.hearing import Hearing
from acpfs.training.coordinator.limits import Limits
from acpfs.training.coordinator.roster import Roster
from acpfs.training.coordinator.states import CREW_TRANSITIONS, Berth, CrewState
from acpfs.training.messages import (
    Beat,
    Done,
    ExitStatus,
    Finished,
    FromCoordinator,
    FromMember,
    Goodbye,
    Hello,
    Leave,
    Protected,
    Refused,
    Resume,
    Running,
    Stop,
    Stopped,
    Trouble,
)

_AT_WORK = (Berth.ENTERED, Berth.RUNNING, Berth.FINISHED)


class Crew:
    """One per coordinator."""

    layout = None
    """Ranks agree about that among themselves."""

    def __init__(self, job: str, limits: Limits) -> None:
        self._job = job
        self._limits = limits
        self.state = CrewState.STANDBY
        self.generation = 0
        self.term = 0
        self.marks: dict[int, Beat] = {}
        self.wake_at = math.inf
        self._look_at = -math.inf
        """When silence is looked for next: no word of others puts that off."""
        self._at_beat: dict[int, int] = {}
        """Generation of each rank's newest beat."""
        self._roster = Roster()
        self._left: set[int] = set()
        self._hearing = Hearing(limits)
        self._deadline = math.inf
        self._began: tuple[float, str] | None = None
        self._lost_since: dict[int, str] = {}
        """Who was lost since all ran."""
        self.unprotected: dict[int, str] = {}
        """Ranks that train on though acpfs has failed in them → why."""
        self._giving_up = GivingUp(limits)
        self._done: dict[int, int] = {}
        self._outcome: Leave | Done | None = None
        self._commands = Commands()
        self._handlers: dict[type[FromMember], Callable[[int, Any, float], None]] = {
            Trouble: self._trouble,
            Stopped: self._stopped,
            Running: self._running,
            Finished: self._finished,
        }

    # -- what happens

    def arrived(self, rank: int, generation: int, message: FromMember, now: float) -> list[Command]:
        """A member said something."""
        self._hearing.look(now)
        self._hearing.heard(rank, now)
        if isinstance(message, Beat):
            self.marks[rank] = message
            self._at_beat[rank] = generation
            self._giving_up.reached(message.done)
        if isinstance(message, Hello):
            self._hello(rank, message, now)
        elif self._roster[rank] is Berth.EMPTY:
            if self.state is not CrewState.STANDBY and rank not in self._left:
                self._commands.send(
                    [rank],
                    Leave(
                        ExitStatus.TAKEN_FOR_LOST,
                        f"rank {rank} was taken for lost: {self.lost.get(rank, 'unknown')}",
                    ),
                )
        elif isinstance(message, Goodbye):
            self._goodbye(rank, message, now)
        elif self.state is CrewState.STANDBY:
            self.generation = max(generation, self.generation)
        elif generation > self.generation:
            self.generation = generation  # the coordinator before this one had stopped the job
            self._fault(Cause.CONSEQUENCE, f"rank {rank} was stopped already", now)
        elif (
            generation + 1 == self.generation
            and isinstance(message, Trouble)
            and self.state is CrewState.PARKING
        ):
            self._giving_up.note(
                CAUSES[message.kind]
            )  # on its way when STOP was; what others said first may be its consequence
        elif (
            generation == self.generation
            and (handler := self._handlers.get(type(message))) is not None
        ):
            handler(rank, message, now)
        return self._ended(now)

    def lose(self, rank: int, why: str, now: float) -> list[Command]:
        """A rank's process ends, or its connection did."""
        self._hearing.look(now)
        self._lose([rank], why, now)
        return self._ended(now)

    def vouched(self, ranks: Iterable[int], now: float) -> None:
        """Somebody on their node sees that these work, though they say nothing."""
        self._hearing.vouched(ranks, now)

    def claimed(self, ours: bool | None, now: float) -> list[Command]:
        """Nobody asks the witness: a side that has not all ranks never goes on."""
        return self._ended(now)

    def take_over(self, term: int, now: float, generation: int = 0) -> list[Command]:
        """This coordinator is active from here on. `generation`: the newest that its voters
        know.
        """
        self.term = term
        self.generation = max(generation, self.generation)
        self._hearing.begin(self._roster.aboard, now)
        self._commands.send(
            self._roster.aboard, Protected()
        )  # who came while nobody commanded waits for it, and takes no order before
        in_loop = [
            rank
            for rank in self._roster.aboard
            if rank in self.marks and not self.marks[rank].parked
        ]
        if self._is_done:
            self._end(now)
        elif not self._roster.aboard:
            self._go(CrewState.GATHERING, now + self._limits.replace_s)
        elif len(in_loop) == self.world and {self._at_beat[rank] for rank in in_loop} == {
            self.generation
        }:
            self._roster.put(self._roster.aboard, Berth.RUNNING)
            self._go(CrewState.RUNNING)
        else:
            self._giving_up.note(Cause.CONSEQUENCE)
            self._stop("another coordinator has taken over", now)
        return self._ended(now)

    def ended(self, outcome: Leave) -> None:
        """The active coordinator says how the job ends, or that one rank has to: that one is
        replaced.
        """
        if outcome.status != ExitStatus.TAKEN_FOR_LOST and not self._is_done:
            self._outcome = outcome

    def deposed(self, now: float) -> list[Command]:
        """Another coordinator has a higher term."""
        if self.state is not CrewState.STANDBY:
            self._go(CrewState.STANDBY)
        return self._ended(now)

    def tick(self, now: float) -> list[Command]:
        """Time has passed."""
        if self.state is CrewState.STANDBY:
            return self._ended(now)
        self._hearing.look(now)
        self._look_at = now + self._limits.beat_s / 2
        if self.state is not CrewState.ENDING:
            patience = (
                self._limits.building_s
                if self.state is CrewState.REBUILDING
                else self._limits.silent_s
            )
            silent = self._hearing.silent(self._roster.aboard, patience, now)
            self._lose(silent, f"silent for {patience:g} s", now)
        if now >= self._deadline:
            self._late(now)
        return self._ended(now)

    # -- what others ask

    @property
    def running(self) -> bool:
        """Whether steps are done."""
        return self.state is CrewState.RUNNING

    @property
    def world(self) -> int:
        """Ranks of the job; 0 before anybody has come."""
        return self._roster.world

    @property
    def hellos(self) -> Mapping[int, Hello]:
        """The processes that are the ranks, or were the last to be."""
        return self._roster.hellos

    @property
    def lost(self) -> Mapping[int, str]:
        """Rank without a process → why."""
        return self._roster.lost

    @property
    def live(self) -> tuple[int, ...]:
        return tuple(self._roster.aboard)

    def heard(self, now: float) -> frozenset[int]:
        """Ranks that have said something lately."""
        return self._hearing.speaking(self._roster.aboard, now)

    def quiet(self, now: float) -> list[int]:
        """Those at whom somebody should look."""
        return self._hearing.quiet(self._roster.aboard, now)

    def could_save(self, ranks: Iterable[int]) -> bool:  # the interface of `phases`
        """Half of a job may have a coordinator: nothing runs before there is a process for each
        rank, and launchers start those once.
        """
        return 0 < self.world <= 2 * len(set(ranks))

    @property
    def alone_s(self) -> float:
        """How long a coordinator stays to which nobody is connected: all ranks may have died, and
        be started again.
        """
        if self._misses_somebody:
            return self._limits.missing_s
        over = self._outcome is not None or (self._left and len(self._left) == self.world)
        return self._limits.leave_s if over else self._limits.replace_s

    @property
    def last_words(self) -> tuple[FromCoordinator, ...]:
        """What a rank may hear that votes for this coordinator, whether it is elected or not: those
        who have left elect nobody.
        """
        return (Protected(), Done()) if self._is_done else ()

    @property
    def _is_done(self) -> bool:
        """Whether the loops of all ranks have ended, and a coordinator has said so.

        Whatever comes later does not change that.
        """
        return isinstance(self._outcome, Done)

    @property
    def _misses_somebody(self) -> bool:
        """Whether all is done, and a rank died before it had left: a process in its place would
        find nobody who says so.
        """
        return self._is_done and bool(self._roster.lost)

    @property
    def status(self) -> str:
        """How it ended, in words."""
        return self._outcome.text if isinstance(self._outcome, Leave) else ""

    # -- who comes, who goes

    def _hello(self, rank: int, hello: Hello, now: float) -> None:
        if self.state is CrewState.ENDING:
            if self._is_done:  # it stays until it has said goodbye
                self._roster.join(hello)
                self._commands.send([rank], Protected())
            self._commands.send([rank], self._outcome or Done())
        elif self.world not in (0, hello.world):
            self._commands.send(
                [rank],
                Refused(
                    f"rank {rank} says that there are {hello.world} ranks, the others say "
                    f"{self.world}"
                ),
            )
        elif self._roster[rank] is Berth.EMPTY or self._roster.hellos[rank] != hello:
            before = self._roster[rank]
            self._roster.join(hello)
            self._left.discard(rank)
            self.marks.pop(rank, None)
            self.unprotected.pop(rank, None)
            if self.state is not CrewState.STANDBY:  # a word of one that does not command
                self._commands.send([rank], Protected())
            if before in _AT_WORK and self.state is not CrewState.STANDBY:
                self._lost_since[rank] = "another process took its place"
                self._fault(Cause.LOSS, f"another process is rank {rank}", now)
            self._go_on(now)

    def _goodbye(self, rank: int, goodbye: Goodbye, now: float) -> None:
        """It leaves in order, or its protection has failed and it trains on: it ends with the next
        fault, and another process comes.
        """
        if goodbye.all_done:
            self._outcome = Done()
        if goodbye.why:
            self.unprotected[rank] = goodbye.why
            self._tell("a rank is not protected any more", rank=rank, why=goodbye.why)
        self._left.add(rank)
        self._roster.leave(rank, None)
        self._wait_anew(now)
        if self.state not in (CrewState.STANDBY, CrewState.ENDING) and not self._end_if_finished(
            now
        ):
            self._go_on(now)

    def _lose(self, ranks: Iterable[int], why: str, now: float) -> None:
        new = [rank for rank in ranks if self._roster[rank] is not Berth.EMPTY]
        for rank in new:
            self._roster.leave(rank, why)
        if not new or self.state is CrewState.STANDBY:
            return
        if self.state is not CrewState.ENDING:
            self._lost_since.update(dict.fromkeys(new, why))
            self._tell("ranks are lost", ranks=tuple(new), why=why)
            self._commands.send(
                new, Leave(ExitStatus.TAKEN_FOR_LOST, why)
            )  # those that live: they hang, or were cut off for a while
        elif self._misses_somebody:
            self._deadline = now + self._limits.missing_s
        self._wait_anew(now)
        if self.state in (CrewState.RUNNING, CrewState.REBUILDING):
            self._fault(Cause.LOSS, why, now)
        self._go_on(now)

    def _wait_anew(self, now: float) -> None:
        """Who starts a process in the place of a rank that went last has as long for it as for the
        first.
        """
        if self.state is CrewState.GATHERING:
            self._deadline = now + self._limits.replace_s

    # -- a fault

    def _trouble(self, rank: int, trouble: Trouble, now: float) -> None:
        if self.state in (CrewState.RUNNING, CrewState.REBUILDING):
            self._tell(
                "a rank is in trouble", rank=rank, kind=trouble.kind.value, text=trouble.text
            )
            self._fault(CAUSES[trouble.kind], f"rank {rank}: {trouble.text}", now)

    def _fault(self, cause: Cause, why: str, now: float) -> None:
        if self.state not in (CrewState.STANDBY, CrewState.ENDING):
            self._giving_up.note(cause)
            self._stop(why, now)

    def _stop(self, why: str, now: float) -> None:
        if self._began is None:
            self._began = (now, why)
        self.generation += 1
        self._done.clear()
        self._roster.put(self._roster.aboard, Berth.CALLED)
        self._go(CrewState.PARKING, now + self._limits.stuck_s)
        self._commands.send(self._roster.aboard, Stop(tuple(sorted(self.lost))))
        self._go_on(now)

    def _stopped(self, rank: int, stopped: Stopped, now: float) -> None:
        if self._roster[rank] is Berth.CALLED:
            self._done[rank] = stopped.done
            self._roster.put([rank], Berth.PARKED)
            self._go_on(now)

    def _late(self, now: float) -> None:
        """The deadline of the state has passed."""
        self._deadline = math.inf
        if self.state is CrewState.PARKING:
            called = self._roster.of(Berth.CALLED)
            busy = self._hearing.busy(called, now)
            self._deadline = (
                now + self._limits.beat_s if busy else math.inf
            )  # it parks when it is through; its copy may be the only one
            self._lose(
                sorted(set(called) - set(busy)), f"not parked after {self._limits.stuck_s:g} s", now
            )
        elif self.state is CrewState.REBUILDING:
            self._fault(Cause.LATE, f"not rebuilt after {self._limits.rebuild_s:g} s", now)
        elif self.state is CrewState.GATHERING:
            missing = [rank for rank in range(self.world) if self._roster[rank] is Berth.EMPTY]
            self._leave(
                f"no process has come for ranks {missing[:8]} in {self._limits.replace_s:g} s", now
            )
        elif self.state is CrewState.ENDING:
            self._commands.add(Finish())

    # -- gather, rebuild, run, end

    def _go_on(self, now: float) -> None:
        """The next state, where what it needs is there."""
        if (
            self.state is CrewState.PARKING
            and not self._roster.of(Berth.CALLED)
            and (self._is_done or not self._is_hopeless(now))
        ):
            self._go(CrewState.GATHERING, now + self._limits.replace_s)
        if (
            self.state is CrewState.GATHERING and self._is_done
        ):  # said by the coordinator before this one, to some who have left
            self._end(now)
        elif self.state is CrewState.GATHERING and self._roster.all(Berth.PARKED):
            self._roster.put(self._roster.aboard, Berth.ENTERED)
            self._go(CrewState.REBUILDING, now + self._limits.rebuild_s)
            self._commands.send(self._roster.aboard, Resume(tuple(sorted(self._lost_since))))

    def _is_hopeless(self, now: float) -> bool:
        """Whether the job is given up with this fault; asked once, when all that live are
        parked.
        """
        if not (why := self._giving_up.verdict(max(self._done.values(), default=None))):
            return False
        self._leave(f"{why}: {self._began[1] if self._began else ''}", now)
        return True

    def _running(self, rank: int, _: Running, now: float) -> None:
        if self._roster[rank] is Berth.ENTERED:
            self._roster.put([rank], Berth.RUNNING)
            self._run_if_all_do(now)

    def _finished(self, rank: int, _: Finished, now: float) -> None:
        if self._roster[rank] in _AT_WORK:
            self._roster.put([rank], Berth.FINISHED)
            if not self._end_if_finished(now):
                self._run_if_all_do(now)

    def _run_if_all_do(self, now: float) -> None:
        if self.state is CrewState.REBUILDING and self._roster.all(Berth.RUNNING, Berth.FINISHED):
            self._go(CrewState.RUNNING)
            self._record("RUNNING", now)
            self._lost_since.clear()

    def _end_if_finished(self, now: float) -> bool:
        """All loops have ended, but for those of ranks that were told so already."""
        if (
            len(self._roster.of(Berth.FINISHED)) + len(self._left) < self.world
            or not self._roster.aboard
        ):
            return False
        self._end(now)
        return True

    def _end(self, now: float) -> None:
        """All is done, and whoever is here is told."""
        self._outcome = Done()
        self._go(
            CrewState.ENDING,
            now + (self._limits.missing_s if self._misses_somebody else self._limits.leave_s),
        )
        self._commands.send(self._roster.aboard, Done())

    def _leave(self, text: str, now: float) -> None:
        self._outcome = Leave(ExitStatus.NOT_SAVED, text)
        self._record("NOT_SAVED", now)
        self._go(CrewState.ENDING, now + self._limits.leave_s)
        self._tell("the job ends", text=text)
        self._commands.send(self._roster.aboard, self._outcome)

    # -- what all of it uses

    def _record(self, status: str, now: float) -> None:
        if self._began is not None:
            began, why = self._began
            fields = {
                "generation": self.generation,
                "term": self.term,
                "world": self.world,
                "lost": dict(self._lost_since),
                "why": why,
            }
            self._commands.add(
                Record(
                    {
                        **fields,
                        "status": status,
                        "text": self.status,
                        "took_s": round(now - began, 3),
                    }
                )
            )
        self._began = None

    def _go(self, state: CrewState, deadline: float = math.inf) -> None:
        if state is not self.state:
            assert state in CREW_TRANSITIONS[self.state], f"{self.state} → {state}"
            self._tell("state", before=self.state.value, now=state.value)
        self.state = state
        self._deadline = deadline

    def _tell(self, event: str, **fields: object) -> None:
        self._commands.add(
            Tell(event, {"generation": self.generation, "term": self.term, **fields})
        )

    def _ended(self, now: float) -> list[Command]:
        """The commands of one event, and when to look again."""
        is_over = (
            self.state is CrewState.ENDING and not self._roster.aboard and not self._misses_somebody
        )
        beats = (
            self._look_at
            if self.state is not CrewState.STANDBY and self._roster.aboard
            else math.inf
        )
        self.wake_at = min(self._deadline, beats)
        return self._commands.take(is_over=is_over)
