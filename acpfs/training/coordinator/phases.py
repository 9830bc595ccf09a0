"""The active coordinator's state machine, without I/O: what happened goes in, commands come out.

    RUNNING ──fault──► STOPPING ──all parked──► SETTLING ──all at S──► SAVING ──all written──►
    PUBLISHING ──► LEAVING
                          ▲                         │                    │                        │
                          └────────── another fault, a save that failed, a new active coordinator ┘

Every STOP begins a generation; what members say about an older one is dropped. A standby keeps the
same record of who registered and who is gone, and begins with it when it takes over: whoever was
stopped says so by the generation of its beat. Time is given, never asked for: `wake_at` says when
`tick` has something to do. Ranks are those whose connection said HELLO: the server vouches for who
speaks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from acpfs.training.coordinator.commands import (
    RUN,
    AskWitness,
    Command,
    Commands,
    Finish,
    Record,
    Tell,
)
from acpfs.training.coordinator.dialogue import Patience, Round
from acpfs.training.coordinator.hearing import Hearing
from acpfs.training.coordinator.limits import Limits
from acpfs.training.decision import (
    Cover,
    Layout,
    LayoutError,
    Meeting,
    NoCover,
    cover,
    differing,
    layout_of,
    meeting,
    newest_copy,
    outvoted,
)
from acpfs.training.messages import (
    Beat,
    ExitStatus,
    FromCoordinator,
    FromMember,
    Goodbye,
    Hello,
    Leave,
    Manifest,
    Protected,
    Publish,
    Published,
    Refused,
    Save,
    Saved,
    Settle,
    Settled,
    Shard,
    Stop,
    Stopped,
    Trouble,
    TroubleKind,
    checkpoint_name,
)


class State(Enum):
    """Where the job is."""

    STANDBY = "standby"
    """Another coordinator commands."""
    REGISTERING = "registering"
    RUNNING = "running"
    STOPPING = "stopping"
    SETTLING = "settling"
    SAVING = "saving"
    PUBLISHING = "publishing"
    LEAVING = "leaving"


_FAULTY = frozenset({State.STOPPING, State.LEAVING, State.STANDBY})
TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.STANDBY: frozenset({State.REGISTERING, State.RUNNING}),
    State.REGISTERING: frozenset({State.RUNNING, State.LEAVING, State.STANDBY}),
    State.RUNNING: _FAULTY,
    State.STOPPING: _FAULTY | {State.SETTLING},
    State.SETTLING: _FAULTY | {State.SAVING},
    State.SAVING: _FAULTY | {State.PUBLISHING},
    State.PUBLISHING: _FAULTY,
    State.LEAVING: frozenset({State.STANDBY}),
}


class Phases:
    """One per coordinator."""

    def __init__(self, job: str, limits: Limits, *, witness: bool = True) -> None:
        """`witness`: whether there is a directory that can be asked when a side has no majority."""
        self._job = job
        self._limits = limits
        self._witness = witness
        self.state = State.STANDBY
        self.generation = 0
        self.term = 0
        self.layout: Layout | None = None
        self.lost: dict[int, str] = {}
        """Rank → why."""
        self.unprotected: dict[int, str] = {}
        """Ranks that train on though acpfs has failed in them → why."""
        self.marks: dict[int, Beat] = {}
        self.wake_at = math.inf
        self._look_at = -math.inf
        """When silence is looked for next: no word of others puts that off."""
        self._hellos: dict[int, Hello] = {}
        self._left: set[int] = set()
        self._alive: dict[int, None] = {}
        """Ranks that are registered, neither lost nor gone: kept, since a thousand of them answer
        each order.
        """
        self._hearing = Hearing(limits)
        self._patience = Patience(limits)
        self._stop_at: float | None = None
        self._failures: Counter[int] = Counter()
        self._naming: set[str] = set()
        """Nodes whose rank was asked to publish: it may have done so before it died."""
        self._round = Round({}, {}, {})
        self._commands = Commands()
        self._began: tuple[float, str] | None = None
        self._status = ""
        self._outcome: Leave | None = None
        self._handlers: dict[type[FromMember], Callable[[int, Any, float], None]] = {
            Hello: self._hello,
            Trouble: self._trouble,
            Stopped: self._stopped,
            Settled: self._settled,
            Saved: self._saved,
            Published: self._published,
            Goodbye: self._goodbye,
        }

    # -- what happens

    def arrived(self, rank: int, generation: int, message: FromMember, now: float) -> list[Command]:
        """A member said something."""
        self._hearing.look(now)
        self._hearing.heard(rank, now)
        if isinstance(message, Beat):
            self.marks[rank] = message
            if self.state is State.SAVING and rank in self._round.waiting:
                self._patience.moves(rank, message.moved, now)
        if self.state is State.STANDBY and message == self._hellos.get(rank):
            self.lost.pop(rank, None)  # only the connection to this standby was gone
            self._alive[rank] = None
        if rank in self.lost:
            self._commands.send(
                [rank],
                Leave(
                    ExitStatus.TAKEN_FOR_LOST, f"rank {rank} was taken for lost: {self.lost[rank]}"
                ),
            )
        elif isinstance(message, Hello | Goodbye):
            self._handlers[type(message)](rank, message, now)
        elif rank not in self._hellos:
            pass
        elif self.state is State.STANDBY:
            self.generation = max(generation, self.generation)
        elif generation > self.generation:
            self.generation = (
                generation  # the coordinator before this one had begun to stop the job
            )
            self._fault(f"rank {rank} was stopped already", now)
        elif isinstance(message, Trouble) or generation == self.generation:
            handler = self._handlers.get(type(message))
            if handler is not None:
                handler(rank, message, now)
        return self._done(now)

    def lose(self, rank: int, why: str, now: float) -> list[Command]:
        """A rank is gone: its process ends, or its connection did."""
        self._hearing.look(now)
        self._lose([rank], why, now)
        return self._done(now)

    def vouched(self, ranks: Iterable[int], now: float) -> None:
        """Somebody on their node sees that these work, though they say nothing."""
        self._hearing.vouched(ranks, now)

    def claimed(self, ours: bool | None, now: float) -> list[Command]:
        """The witness's answer; None: there was none."""
        self._hearing.look(now)
        if self.state is State.SETTLING and self._round.claim is None:
            self._round.claim = self._has_majority if ours is None else ours
            self._save_if_settled(now)
        return self._done(now)

    def take_over(self, term: int, now: float, generation: int = 0) -> list[Command]:
        """This coordinator is active from here on. `generation`: the newest that its voters
        know.
        """
        self.term = term
        self.generation = max(generation, self.generation)
        self._hearing.begin(self._live, now)
        self._go(State.REGISTERING)
        if self._outcome is None:
            self._register(now)
        if self._outcome is not None:
            self._leave(ExitStatus.SAVED, self._outcome.text, now, self._outcome.gasp)
        elif self.generation:
            self._fault("the job was stopped already", now)
        elif self.lost:
            self._fault("a rank was lost meanwhile", now)
        return self._done(now)

    def ended(self, outcome: Leave) -> None:
        """The active coordinator says how the job ends: ranks that leave now are not lost, whoever
        has to tell the others.
        """
        if self.state is State.STANDBY and outcome.status == ExitStatus.SAVED:
            self._outcome = outcome

    def deposed(self, now: float) -> list[Command]:
        """Another coordinator has a higher term."""
        if self.state is not State.STANDBY:
            self._go(State.STANDBY)
        self._stop_at = None
        return self._done(now)

    def tick(self, now: float) -> list[Command]:
        """Time has passed."""
        if self.state is State.STANDBY:
            return self._done(now)
        self._hearing.look(now)
        self._look_at = now + self._limits.beat_s / 2
        if self.state not in (State.REGISTERING, State.LEAVING):
            silent = self._hearing.silent(self._alive, self._limits.silent_s, now)
            self._lose(silent, f"silent for {self._limits.silent_s:g} s", now)
        if self.state in (State.STOPPING, State.SETTLING, State.SAVING, State.PUBLISHING):
            self._lose(
                self._dispensable(now),
                f"silent for {self._limits.stuck_s:g} s of a gasp, and others have what it has",
                now,
            )
        if self._stop_at is not None and now >= self._stop_at:
            self._stop(now)
        elif now >= self._patience.until:
            self._late(now)
        return self._done(now)

    @property
    def world(self) -> int:
        """Ranks of the job; 0 before anybody has registered."""
        return next(iter(self._hellos.values())).world if self._hellos else 0

    @property
    def hellos(self) -> Mapping[int, Hello]:
        """Who registered."""
        return self._hellos

    @property
    def status(self) -> str:
        """How it ended, in words."""
        return self._status

    @property
    def running(self) -> bool:
        """Whether steps are done."""
        return self.state is State.RUNNING

    @property
    def last_words(self) -> tuple[FromCoordinator, ...]:
        """What a rank may hear from a coordinator that is not elected: nothing."""
        return ()

    @property
    def alone_s(self) -> float:
        """How long a coordinator stays to which nobody is connected any more."""
        return self._limits.leave_s

    # -- registration

    def _hello(self, rank: int, hello: Hello, now: float) -> None:
        if self.state is State.LEAVING:
            self._commands.send([rank], Leave(ExitStatus.NOT_SAVED, "the job ends"))
        elif rank in self._hellos and self._hellos[rank] != hello:
            self._commands.send([rank], Refused(f"rank {rank} is another process"))
        elif rank not in self._hellos:
            self._hellos[rank] = hello
            self._alive[rank] = None
            if self.state in (State.STANDBY, State.REGISTERING):
                self._register(now)
        elif self.state is State.RUNNING:
            self._commands.send([rank], Protected())

    def _register(self, now: float) -> None:
        if len(self._hellos) < max(self.world, 1):
            return
        try:
            self.layout = layout_of(self._hellos)
        except LayoutError as error:
            if self.state is State.REGISTERING:
                self._tell("no protection", why=str(error))
                self._commands.send(self._live, Refused(str(error)))
                self._gone(self._hellos)  # training goes on or not as its program decides
                self._leave(ExitStatus.NOT_SAVED, f"no protection: {error}", now)
            return
        if self.state is State.REGISTERING:
            self._go(State.RUNNING)
            self._hearing.begin(self._alive, now)  # whoever registered first may have waited long
            self._commands.send(self._live, Protected())
            self._tell(
                "all ranks are registered", world=self.world, shards=len(self.layout.holders)
            )

    def _goodbye(self, rank: int, goodbye: Goodbye, now: float) -> None:
        self._gone([rank])
        if goodbye.why:
            self.unprotected[rank] = goodbye.why
            self._tell("a rank is not protected any more", rank=rank, why=goodbye.why)
        if self.state in (State.REGISTERING, State.RUNNING) and not self._alive:
            self._leave(ExitStatus.SAVED, "all ranks have left in order", now)
        elif self.state is State.STOPPING and self._stop_at is None:
            self._meet_if_all_parked(now)
        elif self.state in (State.SETTLING, State.SAVING, State.PUBLISHING):
            self._fault(f"rank {rank} left", now)

    def _gone(self, ranks: Iterable[int]) -> None:
        """They end in order."""
        for rank in ranks:
            self._left.add(rank)
            self._alive.pop(rank, None)
            self._round.waiting.discard(rank)

    # -- a fault

    def _lose(self, ranks: Iterable[int], why: str, now: float) -> None:
        new = [rank for rank in ranks if rank not in self.lost and rank not in self._left]
        if not new:
            return
        if self.state is State.LEAVING:
            self._gone(new)
            return
        self.lost.update(dict.fromkeys(new, why))
        for rank in new:
            self._alive.pop(rank, None)
        if self.state is State.STANDBY:
            return
        self._tell(
            "ranks are lost",
            ranks=tuple(new),
            why=why,
            marks={rank: _marks(self.marks.get(rank)) for rank in new},
        )
        self._commands.send(
            new, Leave(ExitStatus.TAKEN_FOR_LOST, why)
        )  # those that live: they hang, or were cut off for a while
        save = self._round.save
        needed = set() if save is None else {*save.savers, self._round.publisher}
        if (
            self.state in (State.SAVING, State.PUBLISHING)
            and save is not None
            and not needed & set(new)
        ):
            return  # the cover is whole, and those who write do not need them
        self._fault(why, now)

    def _fault(self, why: str, now: float) -> None:
        if self.state is State.REGISTERING:
            self._leave(ExitStatus.NOT_SAVED, f"before all ranks had registered: {why}", now)
        elif self.state not in (State.LEAVING, State.STANDBY):
            if self._began is None:
                self._began = (now, why)
            if self._stop_at is None:
                self._stop_at = now + self._limits.settle_down_s
            self._go(State.STOPPING)
            if now >= self._stop_at:
                self._stop(now)

    def _stop(self, now: float) -> None:
        self._stop_at = None
        self.generation += 1
        self._round = Round({}, {}, {}, set(self._alive))
        self._patience.begin(now, self._limits.stuck_s)
        self._commands.send(self._live, Stop(tuple(sorted(self.lost))))
        self._meet_if_all_parked(now)

    def _trouble(self, rank: int, trouble: Trouble, now: float) -> None:
        self._tell("a rank is in trouble", rank=rank, kind=trouble.kind.value, text=trouble.text)
        if trouble.kind is not TroubleKind.SAVE:
            if self.state is State.RUNNING:
                self._fault(f"rank {rank}: {trouble.text}", now)
        elif self.state in (State.SETTLING, State.SAVING, State.PUBLISHING):
            self._failed([rank], trouble.text, now)

    def _failed(self, ranks: Iterable[int], why: str, now: float) -> None:
        """Ranks could not settle, write or publish."""
        self._failures.update(ranks)
        if self._failures.total() >= self._limits.failures_max:
            self._leave(ExitStatus.NOT_SAVED, f"nobody could save: {why}", now)
        else:
            self._fault(f"a rank could not save: {why}", now)

    def _late(self, now: float) -> None:
        """The deadline of the state has passed."""
        if self.state is State.LEAVING:
            self._patience.end()
            self._commands.add(Finish())
            return
        late = sorted(
            self._round.waiting if self._round.publisher is None else {self._round.publisher}
        )
        if not self.could_save(self._alive.keys() - set(late)) and (
            self._patience.is_left(now) or self._hearing.busy(late, now)
        ):
            self._patience.wait(
                now
            )  # nobody else has what it has, and a storage that stands still comes back
            return
        self._patience.end()
        if self.state is State.STOPPING:
            self._lose(late, f"not parked after {self._limits.stuck_s:g} s", now)
        elif self.state is State.SETTLING:
            self._lose(late, f"not settled after {self._limits.settle_s:g} s", now)
        elif self.state is State.SAVING:
            self._failed(late, f"nothing written in {self._limits.save_s:g} s", now)
        elif self.state is State.PUBLISHING:
            self._failed(late, f"not published after {self._limits.publish_s:g} s", now)

    # -- stop, settle, save, publish, leave

    def _stopped(self, rank: int, stopped: Stopped, now: float) -> None:
        if self.state is State.STOPPING and self._stop_at is None:
            self._round.stopped[rank] = stopped
            self._round.waiting.discard(rank)
            self._meet_if_all_parked(now)

    def _meet_if_all_parked(self, now: float) -> None:
        layout = self.layout
        if layout is None or self._round.waiting:
            return
        parked = {
            rank: report for rank, report in self._round.stopped.items() if rank in self._alive
        }
        published = [
            stopped.published for stopped in parked.values() if stopped.published is not None
        ]
        if published:
            self._leave(
                ExitStatus.SAVED,
                "the gasp is published",
                now,
                checkpoint_name(layout.name, max(published)),
            )
            return
        found = meeting(layout, parked, self._unable)
        missing = found.missing if isinstance(found, NoCover) else ()
        back = newest_copy(layout, parked, self._unable) if missing else None
        self._round.back = back
        if back is not None:
            nobody = frozenset[int]()
            found = Meeting(back.step, frozenset(parked), nobody, nobody, None, frozenset())
            self._tell("survivors go back to copies", step=back.step, missing=missing)
        if isinstance(found, NoCover):
            self._leave(ExitStatus.NOT_SAVED, f"no survivor can write {_first(found.missing)}", now)
        elif found.step <= layout.begun:
            self._leave(
                ExitStatus.NOT_SAVED,
                "no update was done since protection began: nothing is lost",
                now,
            )
        else:
            self._settle(found, layout, now)

    def _settle(self, found: Meeting, layout: Layout, now: float) -> None:
        self._round.meeting = found
        self._round.waiting = set(self._round.asked)
        self._go(State.SETTLING, now, self._limits.settle_s)
        self._tell(
            "survivors meet",
            step=found.step,
            there=len(found.there),
            coming=tuple(sorted(found.coming)),
            behind=len(found.behind),
        )
        self._commands.send(sorted(self._round.asked), Settle(found.step, found.gate))
        if self.lost and len(set(layout.nodes.values())) > 1:
            if self._witness:
                self._round.claim = None
                self._commands.add(AskWitness(RUN, self._has_majority))
            else:
                self._round.claim = self._has_majority

    def _settled(self, rank: int, settled: Settled, now: float) -> None:
        if (
            self.state is State.SETTLING
            and self._round.meeting is not None
            and rank not in self._round.meeting.behind
        ):
            self._round.settled[rank] = settled
            self._round.waiting.discard(rank)
            self._save_if_settled(now)

    def _save_if_settled(self, now: float) -> None:
        found = self._round.meeting
        layout = self.layout
        if found is None or layout is None or self._round.claim is None or self._round.waiting:
            return
        if not self._round.claim:
            self._leave(ExitStatus.OTHER_SIDE, "the job is split, and this side may not save", now)
            return
        back = self._round.back
        if back is not None:
            self._save(found, layout, back.cover, {}, now)
            return
        different = differing(
            layout, {rank: settled.digests for rank, settled in self._round.settled.items()}
        )
        if different:
            self._tell("copies of a shard differ", shards=different)
        able = {
            rank for rank, settled in self._round.settled.items() if settled.done == found.step
        } - self._unable
        chosen = cover(layout, able, found.torn | outvoted(different))
        if isinstance(chosen, NoCover):
            self._leave(
                ExitStatus.NOT_SAVED,
                f"no survivor can write {_first(chosen.missing)} of step {found.step}",
                now,
            )
            return
        self._save(found, layout, chosen, different, now)

    def _save(
        self,
        found: Meeting,
        layout: Layout,
        chosen: Cover,
        different: Mapping[Shard, Mapping[int, str]],
        now: float,
    ) -> None:
        back = self._round.back
        name = checkpoint_name(layout.name, found.step)
        savers = tuple(sorted(set(chosen.values())))
        lost = tuple(sorted(self.lost))
        # the job is in it: what an earlier one left of the same step is not mixed with this one's
        written = f"{name}.gasp-{self._job}-{self.generation}.tmp"
        whose = {} if back is None else back.whose
        self._round.save = Save(found.step, chosen, savers, written, name, lost, whose)
        nodes = tuple(sorted({layout.nodes[rank] for rank in savers}))
        digests = {
            shard: digest
            for shard, rank in chosen.items()
            if back is None and (digest := self._round.settled[rank].digests.get(shard)) is not None
        }
        self._round.manifest = Manifest(
            self._job, self.generation, found.step, lost, chosen, (), digests, nodes, different
        )
        self._round.waiting = set(savers)
        self._go(State.SAVING, now, self._limits.save_s)
        self._commands.send(self._live, self._round.save)

    def _saved(self, rank: int, saved: Saved, now: float) -> None:
        save = self._round.save
        manifest = self._round.manifest
        if (
            self.state is not State.SAVING
            or save is None
            or manifest is None
            or rank not in save.savers
        ):
            return
        self._round.saved[rank] = saved
        self._round.waiting.discard(rank)
        if not self._round.waiting:
            files = tuple(
                sorted(
                    (file for one in self._round.saved.values() for file in one.files),
                    key=lambda file: file.path,
                )
            )
            full = replace(manifest, files=files, lost=tuple(sorted(self.lost)))
            self._go(State.PUBLISHING, now, self._limits.publish_s)
            self._publish(Publish(full, save.directory, save.name), save)

    def _publish(self, order: Publish, save: Save) -> None:
        """On a node where somebody was asked to before, if one of its ranks is left: a rename of
        that one is seen there at once.
        """
        assert self.layout is not None
        nodes = self.layout.nodes
        choices = [
            rank
            for rank in (*save.savers, *self._live)
            if nodes[rank] in self._naming and rank not in self._unable
        ]
        publisher = (*choices, *save.savers)[0]
        self._round.publisher = publisher
        elsewhere = tuple(sorted(self._naming - {nodes[publisher]}))
        self._naming.add(nodes[publisher])
        self._commands.send([publisher], replace(order, elsewhere=elsewhere))

    def _published(self, rank: int, published: Published, now: float) -> None:
        if (
            self.state is State.PUBLISHING
            and self._round.save is not None
            and rank == self._round.publisher
        ):
            self._leave(
                ExitStatus.SAVED,
                f"the gasp of step {self._round.save.step} is published",
                now,
                published.path,
            )

    def _leave(self, status: ExitStatus, text: str, now: float, gasp: str = "") -> None:
        if self._began is not None:
            self._record(status, text, now, gasp)
        self._status = text
        self._stop_at = None
        self._go(State.LEAVING, now, self._limits.leave_s)
        self._tell("the job ends", status=status.name, text=text, gasp=gasp)
        self._commands.send(self._live, Leave(status, text, gasp))

    # -- what all of it uses

    def _record(self, status: ExitStatus, text: str, now: float, gasp: str) -> None:
        began, why = self._began or (now, "")
        marks = {rank: _marks(self.marks.get(rank)) for rank in sorted(self.lost)}
        fields = {
            "generation": self.generation,
            "term": self.term,
            "world": self.world,
            "lost": self.lost,
            "marks": marks,
            "why": why,
        }
        step = self._round.meeting.step if self._round.meeting else None
        self._commands.add(
            Record(
                {
                    **fields,
                    "step": step,
                    "status": status.name,
                    "text": text,
                    "gasp": gasp,
                    "took_s": round(now - began, 3),
                }
            )
        )

    @property
    def _live(self) -> list[int]:
        return sorted(self._alive)

    @property
    def live(self) -> tuple[int, ...]:
        """Registered, neither lost nor gone in order."""
        return tuple(self._live)

    def heard(self, now: float) -> frozenset[int]:
        """Those of the living who have said something lately."""
        return self._hearing.speaking(self._alive, now)

    def quiet(self, now: float) -> list[int]:
        """Those of the living at whom somebody should look."""
        return self._hearing.quiet(self._alive, now)

    def could_save(self, ranks: Iterable[int]) -> bool:
        """Whether these hold everything."""
        return self.layout is not None and not isinstance(cover(self.layout, ranks), NoCover)

    def _dispensable(self, now: float) -> list[int]:
        """Whom a gasp waits for no longer, though its node sees it work: it may hang in a storage,
        and others have what it has.
        """
        found: list[int] = []
        for rank in self._hearing.unheard(self._alive, self._limits.stuck_s, now):
            if self.could_save(self._alive.keys() - {*found, rank}):
                found.append(rank)
        return found

    @property
    def _has_majority(self) -> bool:
        return 2 * len(self._alive) > self.world

    @property
    def _unable(self) -> frozenset[int]:
        return frozenset(
            rank
            for rank, count in self._failures.items()
            if count >= self._limits.rank_failures_max
        )

    def _go(self, state: State, now: float = 0.0, patience_s: float = math.inf) -> None:
        """`patience_s`: how long this state may take."""
        if state is not self.state:
            assert state in TRANSITIONS[self.state], f"{self.state} → {state}"
            self._tell("state", before=self.state.value, now=state.value)
        self.state = state
        self._patience.begin(now, patience_s)

    def _tell(self, event: str, **fields: object) -> None:
        self._commands.add(
            Tell(event, {"generation": self.generation, "term": self.term, **fields})
        )

    def _done(self, now: float) -> list[Command]:
        """The commands of one event, and when to look again."""
        is_over = self.state is State.LEAVING and not self._alive
        beats = math.inf if self.state is State.STANDBY or not self._alive else self._look_at
        self.wake_at = min(
            self._patience.until, beats, math.inf if self._stop_at is None else self._stop_at
        )
        return self._commands.take(is_over=is_over)


def _marks(beat: Beat | None) -> str:
    return "" if beat is None else f"{beat.phase.value} done={beat.done} ready={beat.ready}"


def _first(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
