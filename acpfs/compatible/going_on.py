"""A rank that goes on behind a fault (`enable_arf`): the processor's side where the coordinator has
each rank replaced.

    STOP     marks are held; stop and clean; the main thread waits for what comes of it
    RESUME every rank tells what it has; rebuild_group where ranks were replaced, repair in those
    who give and get, rollback in all DONE the train functions of all ranks have ended

Who gives what is `training.sources`' decision, from reports that travel over the coordinator's
store. Tensors are the framework's: its repair handler sends and receives them. One thread obeys;
what the main thread calls only sets and waits for events.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from acpfs.compatible.handlers import Handlers
from acpfs.compatible.processor import LOOK_S, Processor, RepairAs
from acpfs.compatible.product_values import Action, RepairType
from acpfs.compatible.update_marks import UpdateMarks
from acpfs.logger import get_logger
from acpfs.training.credentials import Credentials
from acpfs.training.first_update import tell_launcher
from acpfs.training.member import GenerationOverError, Member, Order
from acpfs.training.messages import (
    Done,
    ExitStatus,
    Finished,
    Phase,
    Resume,
    Running,
    Shard,
    Stop,
    Stopped,
    StoreVerb,
    Trouble,
    TroubleKind,
)
from acpfs.training.policy import Policy
from acpfs.training.records import from_json, to_json
from acpfs.training.sources import Having, Origin, Sources, sources

log = get_logger("acpfs.compatible")
TOLD_S = 180.0
"""So long a rank waits for what another one has, as the product waits for an action."""
ASK_S = 1.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """One shard from one rank to another."""

    optimizer: int
    source: int
    target: int
    group: tuple[int, ...]


class GoingOn(Processor):
    """Of one rank."""

    replaces = True

    def __init__(
        self,
        rank: int,
        world: int,
        job: str,
        credentials: Credentials | None,
        marks: UpdateMarks,
        handlers: Handlers,
        policy: Policy,
        *,
        rebooted: bool,
    ) -> None:
        """`rebooted`: this process takes another one's place."""
        super().__init__(rank, world, job, credentials, marks, handlers, policy)
        self.rebooted = rebooted
        self.repair_step = 0
        self._prepared, self._stopping, self._goes_on, self._done = (
            threading.Event() for _ in range(4)
        )
        self._before: Stopped | None = None
        """Where this process was when it was stopped first, until it has the state of all again."""
        self._holders: Mapping[Shard, tuple[int, ...]] = {}
        self._obeyed = 0
        """Number of the command that is being carried out."""
        self._said_running = False

    # -- the main thread's side

    def register(self, holders: Mapping[Shard, tuple[int, ...]], node: str) -> None:
        self._holders = holders
        super().register(holders, node)

    def prepared(self) -> None:
        """This process has built what it needs ("ARF FINISH"), and waits to be given its state."""
        self._goes_on.clear()
        self._prepared.set()

    def report_stopped(self) -> None:
        self._goes_on.clear()
        super().report_stopped()

    def report_trouble(self, kind: TroubleKind, text: str) -> bool:
        self._goes_on.clear()
        return super().report_trouble(kind, text)

    def updated(self) -> None:
        if self._member is not None and not self._member.parked and not self._said_running:
            self._said_running = True
            self._member.tell(Running())
            tell_launcher()

    def wait_action(self) -> Action:
        """Until the state is whole again, or the job is over.

        Before the rank is registered a process that takes a place goes on.
        """
        if self._member is None:
            return Action.RETRY if self.rebooted else Action.EXIT
        while not self._goes_on.wait(LOOK_S):
            if self._over.is_set() or self.is_done:
                return Action.EXIT
        return Action.RETRY

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def finish(self) -> bool:
        """The train function has ended; whether those of all ranks have.

        False: another rank has to be given what this one has.
        """
        if self._member is None:
            return True
        self._member.tell(Finished())
        while not (self._done.wait(LOOK_S) or self._over.is_set()):
            if self._stopping.is_set():
                self.report_stopped()
                return False
        return True

    # -- the thread

    def _obey(self, member: Member, order: Order) -> None:
        self._obeyed = order.number
        if isinstance(order.command, Resume):
            try:
                self._resume(member, order, order.command)
            except GenerationOverError:
                log.info("another fault came", generation=order.generation)
        elif isinstance(order.command, Done):
            self._done.set()
        else:
            super()._obey(member, order)

    def _stop(self, member: Member, order: Order) -> None:
        assert isinstance(order.command, Stop)
        member.parked = True
        self._goes_on.clear()
        self._stopping.set()
        if self._rebuilt:
            super()._stop(member, order)
        else:  # nothing runs here yet: the main thread builds, or waits to be given its state
            member.tell(Stopped(0, 0, Phase.COMPUTING))

    @property
    def _rebuilt(self) -> bool:
        """Whether this process has, or had, a state of its own."""
        return not self.rebooted

    def _named(self, stop: Stop) -> RepairAs:
        return RepairAs.RECOVER if stop.lost else RepairAs.RETRY

    def _has_stopped(self, member: Member, stopped: Stopped) -> None:
        if member.order(self._obeyed, 0.0) is not None:
            return  # another fault came before it had stopped: it is asked again
        if stopped.damaged and not self._memory_failed:
            log.error(
                "the device could not be stopped and cleaned: another process has to take this "
                "rank's place"
            )
            self.end_process(ExitStatus.TAKEN_FOR_LOST)
        if self._before is None:
            self._before = stopped
        elif stopped.damaged:
            self._before = Stopped(
                self._before.done, self._before.ready, self._before.phase, stopped.damaged
            )
        member.tell(stopped)

    def _resume(self, member: Member, order: Order, resume: Resume) -> None:
        found = self._found_out(member, order.generation)
        if found.origin is not Origin.MEMORY and self._before is not None:
            log.error("no copy of a shard is left: this job ends")
            self._over.set()
            self.end_process(ExitStatus.NOT_SAVED)
            return
        self._said_running = False
        if (
            found.origin is not Origin.MEMORY and not self.rebooted
        ):  # the first of all: the main thread trains, and may report already
            member.parked = False
            return
        if self.rebooted and not self._wait(member, order, self._prepared.is_set, float("inf")):
            return
        if found.origin is Origin.MEMORY and not self._repair(found, resume):
            member.tell(Trouble(TroubleKind.ERROR, "a handler failed"))
            return
        self._go_on(member, found.step)

    def _go_on(self, member: Member, step: int) -> None:
        """The main thread waits until here."""
        self._marks.resume(step)
        self.repair_step = step
        self._before = None
        self.rebooted = False
        self._memory_failed = False
        self._device_failed = False
        self._reported.clear()
        self._stopping.clear()
        member.parked = False
        log.warning("goes on", step=step)
        self._goes_on.set()

    def _found_out(self, member: Member, generation: int) -> Sources:
        """What every rank decides, from what every rank has."""
        mine = {
            "holders": dict(self._holders),
            "stopped": None if self._before is None else to_json(self._before),
        }
        self._asked(member, StoreVerb.SET, f"has-{generation}-{self._rank}", json.dumps(mine))
        having: dict[int, Having] = {}
        for rank in range(self._world):
            told = json.loads(self._asked(member, StoreVerb.GET, f"has-{generation}-{rank}"))
            stopped = None if told["stopped"] is None else from_json(Stopped, told["stopped"])
            having[rank] = Having(
                {shard: tuple(ranks) for shard, ranks in told["holders"].items()}, stopped
            )
        return sources(having)

    def _asked(self, member: Member, verb: StoreVerb, key: str, value: str = "") -> str:
        """Asked again and again: a command that comes between the look and the question would not
        end one that waits long.

        Raises:
            GenerationOverError: a newer command is there, or a rank tells nothing.
        """
        deadline = time.monotonic() + TOLD_S
        while time.monotonic() < deadline and member.order(self._obeyed, 0.0) is None:
            answer = member.ask(verb, (key,), value, "", ASK_S)
            if not answer.late and member.order(self._obeyed, 0.0) is None:
                return answer.value
        raise GenerationOverError(key)

    def _repair(self, found: Sources, resume: Resume) -> bool:
        """Whether all handlers did what they are for."""
        transfers = transfers_of(found, self._holders)
        gives = [one for one in transfers if one.source == self._rank]
        gets = [one for one in transfers if one.target == self._rank]
        if resume.replaced and not self._handlers.rebuild_group(list(resume.replaced)):
            return False
        for kind, own in ((RepairType.RT_SEND, gives), (self._wanted, gets)):
            if own and not self._handlers.repair(found.step, kind, repair_info(kind, own)):
                return False
        return self._handlers.rollback(found.step)

    @property
    def _wanted(self) -> RepairType:
        if not self._memory_failed:
            return RepairType.RT_RECV_REPAIR
        return (
            RepairType.RT_UCE_LOWLEVEL
            if self._handlers.cleaned_without_rebuild
            else RepairType.RT_UCE_HIGHLEVEL
        )


def transfers_of(found: Sources, holders: Mapping[Shard, tuple[int, ...]]) -> list[Transfer]:
    """Who gives what to whom; `holders` need only be this rank's."""
    return [
        Transfer(
            int(shard.split("/")[0].removeprefix("opt")),
            found.givers[shard],
            rank,
            tuple(holders.get(shard, ())),
        )
        for shard, wanting in sorted(found.wanting.items())
        for rank in wanting
    ]


def repair_info(kind: RepairType, transfers: list[Transfer]) -> dict[str, Any]:
    """As the product's handlers are told: one entry of each list per transfer."""
    return {
        "type": [one.optimizer for one in transfers],
        "repair_type": kind.value,
        "src": [one.source for one in transfers],
        "dst": [one.target for one in transfers],
        "rank_list": sorted({rank for one in transfers for rank in one.group}),
    }
