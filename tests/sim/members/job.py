"""A job on all members: ranks save a checkpoint, one of them makes the pointer name it, older ones
go.

Between its steps is what a collective operation is: nobody begins before all others were told. So
what a rank has closed was closed before the pointer, whatever the clocks say. Where a member ends,
the job goes on with the others, and with it when it is back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import trio

from acpfs.types import ROOT
from acpfs.writeback.members.cluster import Cluster
from tests.sim.choices import Choices
from tests.sim.members.member import Member
from tests.sim.members.plan import CLOCK_BOUND_S, SET_RIGHT_S, Plan, Style
from tests.sim.programs import Died, by_path
from tests.sim.trace import Finding, Trace
from tests.sim.virtual import MACHINE

POINTER = "latest"
TEMPORARY = "latest.tmp"
WAITS = 0.3
"""Share of checkpoints of which a rank waits until others have persisted theirs."""
SIZES = (1, 5000, 60_000)
PAUSES_S = (0.0, 0.0, 1.0, 20.0)
DAWDLES_S = (0.0, 0.2, 1.0, 5.0, 20.0)
AT_ONCE = 0.7
"""Share of checkpoints that begin at once when somebody new has come, where one is to come."""
MOST_AWAITED_S = 100.0
JOIN_LOOK_S = 0.05
NEWS_S = 60.0
"""Who came less long ago may be overlooked where listings are remembered (`others_persisted`)."""
LONGEST_S = 4000.0
"""Of a step of the job."""
OPERATOR_S = 400.0
"""After which a person looks at a wait that goes on: nothing else ends one for a lost RAM (S164).
Longer than what ends by itself: absences, and until a member counts as missing.
"""
ATTENDS_S = 20.0
"""Between two looks of that person."""


@dataclass
class Checkpoint:
    """One that a job has saved."""

    step: int
    files: dict[str, bytes] = field(default_factory=dict)
    owners: dict[str, tuple[Member, int]] = field(default_factory=dict)
    """File → who closed it, and how often that member had lost its RAM by then."""
    metadata_of: Member | None = None
    """Who closed its `.metadata`."""
    is_told: bool = False
    """That the pointer names it."""
    told_by: tuple[Member, int] | None = None
    is_uncovered: bool = False
    """A member had come back without its RAM before the pointer was closed (S164)."""
    is_going: bool = False
    """The job has begun to remove it."""
    remover: tuple[Member, int] | None = None
    """Who removed its `.metadata`."""

    @property
    def directory(self) -> str:
        return f"step-{self.step}"

    @property
    def metadata(self) -> str:
        return f"{self.directory}/.metadata"


class Job:
    """See above."""

    def __init__(
        self,
        members: list[Member],
        plan: Plan,
        choices: Choices,
        trace: Trace,
        waited: Callable[[dict[str, bytes]], None],
        attend: Callable[[], Awaitable[None]],
    ) -> None:
        """`waited`: a wait for what others had closed has ended, for these files. `attend`: an
        operator ends what only a person can end.
        """
        self._waited = waited
        self._attend = attend
        self.members = members
        self._plan = plan
        self._choices = choices
        self._trace = trace
        self.checkpoints: list[Checkpoint] = []
        self._coordinator = members[0]

    async def run(self) -> None:
        """All its steps."""
        for step in range(1, self._plan.steps + 1):
            if ("job", step) in self._choices.without_calls:
                continue
            chance = self._choices.stream("job", step)
            with trio.move_on_after(LONGEST_S) as scope:
                await self._step(step, chance)
            if scope.cancelled_caught:
                raise Finding("LIVENESS", f"step {step} of the job does not end")
            await trio.sleep(3 * CLOCK_BOUND_S + chance.choice(PAUSES_S))
            await self._await_somebody(chance)
            if self._plan.awaits_news:
                await self._await_news(self._choices.stream("news", step))

    async def _await_somebody(self, chance: random.Random) -> None:
        """A checkpoint often begins when a new member has just come: others may not have heard of
        that one.
        """
        to_come = [one for one in self.members if not one.has_come and one.plan.joins_s]
        if not to_come or chance.random() >= AT_ONCE:
            return
        self._trace.note("job", "waits for a new member", (to_come[0].node,))
        with trio.move_on_after(MOST_AWAITED_S):
            while not to_come[0].is_up:  # noqa: ASYNC110 - in virtual time
                await trio.sleep(JOIN_LOOK_S)

    async def _await_news(self, chance: random.Random) -> None:
        """Somebody is back, or somebody's clock has just been set; whichever comes first."""
        if chance.random() >= AT_ONCE:
            return
        away = [one for one in self.members if one.is_away and not one.is_gone]
        now_s = MACHINE.moment_s
        sets = [one.clock_set_s + chance.uniform(0.0, SET_RIGHT_S) for one in self.members]
        soon = min((at for at in sets if at > now_s), default=now_s)
        self._trace.note("job", "waits for news", tuple(one.node for one in away))
        with trio.move_on_after(MOST_AWAITED_S):
            while (away or MACHINE.moment_s < soon) and not any(one.is_up for one in away):
                if MACHINE.moment_s >= soon > now_s:
                    return
                await trio.sleep(JOIN_LOOK_S)

    async def _step(self, step: int, chance: random.Random) -> None:
        while not (living := [one for one in self.members if one.is_up]):
            if all(one.is_gone for one in self.members):
                return
            await trio.sleep(0.1)
        checkpoint = Checkpoint(step)
        machines = {one.node: one.machine for one in living}
        took_part = await self._all(living, lambda one: self._save(one, checkpoint, chance))
        self.checkpoints.append(checkpoint)
        if took_part and chance.random() < WAITS:
            await self._wait_for_others(chance.choice(took_part), checkpoint)
        is_whole = all(one.machine == machines[one.node] and one.is_up for one in living)
        if not took_part or not is_whole:
            self._trace.note("job", f"gives up step {step}")
            return  # as a job that lost a rank: it goes on from the last checkpoint
        coordinator = self._coordinator if self._coordinator in took_part else took_part[0]
        if self._plan.changes_coordinator:
            coordinator = chance.choice(took_part)
        self._coordinator = coordinator
        if await self._all([coordinator], lambda one: self._publish(one, checkpoint)):
            await self._rotate(took_part, coordinator)

    async def _wait_for_others(self, member: Member, checkpoint: Checkpoint) -> None:
        """As a rank does before it reads what others have saved.

        Who is not heard is not waited for.
        """
        life = member.serves
        if life is None:
            return
        others = {
            one.node: one.machine
            for one in self.members
            if one is not member
            and one.is_up
            and one.plan.partition is None
            and one.came_s < MACHINE.moment_s - NEWS_S * one.may_be_overlooked
        }

        async def wait(cluster: Cluster) -> bool:
            await cluster.others_persisted(lambda _behind: None)
            return True

        self._trace.note(member.node, "waits for others")
        has_ended = trio.Event()
        async with trio.open_nursery() as beside:
            beside.start_soon(self._attend_until, has_ended)
            answered = await member.ask_cluster(life, wait)
            has_ended.set()
        if not answered:
            return
        still = {
            one.node for one in self.members if one.is_up and others.get(one.node) == one.machine
        }
        owners = checkpoint.owners.items()
        self._waited(
            {path: checkpoint.files[path] for path, (owner, _lost) in owners if owner.node in still}
        )

    async def _attend_until(self, has_ended: trio.Event) -> None:
        """It is not cancelled amid a call: what an operator has begun is done."""
        with trio.move_on_after(OPERATOR_S):
            await has_ended.wait()
        while not has_ended.is_set():
            await self._attend()
            with trio.move_on_after(ATTENDS_S):
                await has_ended.wait()

    async def _all(
        self, members: list[Member], act: Callable[[Member], Awaitable[None]]
    ) -> list[Member]:
        """Have them do it at the same time; those that did."""
        done: list[Member] = []

        async def one_of(member: Member) -> None:
            with contextlib.suppress(Died):
                try:
                    await act(member)
                except OSError as failure:
                    name = errno.errorcode.get(failure.errno or 0, "?")
                    raise Finding(
                        "ANSWER", f"a call on {member.node} fails with {name}"
                    ) from failure
                done.append(member)

        async with trio.open_nursery() as nursery:
            for member in members:
                nursery.start_soon(one_of, member)
        return [one for one in members if one in done]

    # -- what ranks do

    async def _save(self, member: Member, checkpoint: Checkpoint, chance: random.Random) -> None:
        await self._make_directory(member, checkpoint.directory)
        for number in range(chance.choice((1, 1, 2))):
            path = f"{checkpoint.directory}/shard-{member.node}-{number}"
            content = chance.randbytes(chance.choice(SIZES))
            await self._write(member, path, content)
            checkpoint.files[path] = content
            checkpoint.owners[path] = (member, member.lost)

    async def _publish(self, member: Member, checkpoint: Checkpoint) -> None:
        names = " ".join(sorted(checkpoint.files)).encode()
        checkpoint.metadata_of = member
        await self._write(member, checkpoint.metadata, names)
        text = checkpoint.directory.encode()
        if self._plan.style is Style.IN_PLACE:
            await self._write(member, POINTER, text)
        elif self._plan.style is Style.RENAMED:
            await self._write(member, TEMPORARY, text)
            await self._dawdle(member, checkpoint)
            await self._rename(member)
        else:
            await self._link(member, text)
            await self._dawdle(member, checkpoint)
            await self._rename(member)
        owners = checkpoint.owners.values()
        checkpoint.is_uncovered = any(one.lost > lost and one.is_up for one, lost in owners)
        checkpoint.is_told = True
        checkpoint.told_by = (member, member.lost)
        self._trace.note(member.node, "points at", (checkpoint.directory,), "done")

    async def _dawdle(self, member: Member, checkpoint: Checkpoint) -> None:
        """What the pointer will be is on the storage by then, or not. A program that ends with its
        machine meanwhile goes on nowhere.
        """
        if self._plan.dawdles:
            chance = self._choices.stream("dawdle", checkpoint.step)
            await member.calls.pause(chance.choice(DAWDLES_S))

    async def _rotate(self, members: list[Member], coordinator: Member) -> None:
        whole = [one for one in self.checkpoints if one.is_told and not one.is_going]
        for checkpoint in whole[: -self._plan.keeps]:
            remover = checkpoint.told_by[0] if checkpoint.told_by else coordinator
            if not remover.is_up:
                return  # others may not see it yet
            checkpoint.is_going = True
            if not await self._all([remover], partial(self._remove, checkpoint.metadata)):
                return
            checkpoint.remover = (remover, remover.lost)
            up = [one for one in members if one.is_up]
            await self._all(up, partial(self._remove_own, checkpoint))
            await self._all([coordinator], partial(self._remove_directory, checkpoint))

    async def _remove_own(self, checkpoint: Checkpoint, member: Member) -> None:
        for path, (owner, _lost) in checkpoint.owners.items():
            if owner is member:
                await self._remove(path, member)

    # -- calls

    async def _make_directory(self, member: Member, name: str) -> None:
        caller = member.new_caller()
        self._trace.note(member.node, "make directory", (name,))
        with contextlib.suppress(FileExistsError):
            await member.calls.request(lambda fs: fs.mkdir(ROOT, name.encode(), 0o755, caller))

    async def _is_there(self, member: Member, path: str) -> bool:
        try:
            await member.calls.ino(path)
        except FileNotFoundError:
            return False
        return True

    async def _write(self, member: Member, path: str, content: bytes) -> None:
        self._trace.note(member.node, "write", (path, len(content)))
        if await self._is_there(member, path):
            file = await member.calls.open(path, os.O_WRONLY | os.O_TRUNC, b"")
        else:
            file = await member.calls.create(path)
        await member.calls.write(file, 0, content)
        await member.calls.close(file)
        self._trace.note(member.node, "write", (path,), "done")
        member.look()

    async def _rename(self, member: Member) -> None:
        async def is_done() -> bool:
            return not await self._is_there(member, TEMPORARY)

        self._trace.note(member.node, "rename", (TEMPORARY, POINTER))
        names = (TEMPORARY.encode(), POINTER.encode())
        await self._is_there(member, POINTER)
        await self._is_there(member, TEMPORARY)
        await member.process.request(
            lambda fs: fs.rename(ROOT, names[0], ROOT, names[1], 0), is_done
        )
        member.look()

    async def _link(self, member: Member, text: bytes) -> None:
        if await self._is_there(member, TEMPORARY):
            await self._remove(TEMPORARY, member)
        caller = member.new_caller()
        self._trace.note(member.node, "symlink", (TEMPORARY,))

        async def is_done() -> bool:
            return await self._is_there(member, TEMPORARY)

        await member.process.request(
            lambda fs: fs.symlink(ROOT, TEMPORARY.encode(), text, caller), is_done
        )

    async def _remove(self, path: str, member: Member) -> None:
        self._trace.note(member.node, "remove", (path,))

        async def act() -> None:
            parent, name = await member.calls.place(path)

            async def is_done() -> bool:
                return not await self._is_there(member, path)

            await member.process.request(lambda fs: fs.unlink(parent, name), is_done)

        with contextlib.suppress(FileNotFoundError):  # its rank had died, and left it to another
            await by_path(act)
        member.look()

    async def _remove_directory(self, checkpoint: Checkpoint, member: Member) -> None:
        name = checkpoint.directory.encode()

        async def is_done() -> bool:
            return not await self._is_there(member, checkpoint.directory)

        try:
            await member.process.request(lambda fs: fs.rmdir(ROOT, name), is_done)
        except OSError as failure:  # what another member removes is still seen here
            if failure.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise
