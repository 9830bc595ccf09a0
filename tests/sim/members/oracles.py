"""What decides that a history of members is wrong: what the storage shows of the job's checkpoints,
at each change.

A pointer there names what is whole there, and never an older checkpoint than before. An operator
who forgets a member, or what it has lost, goes on without what that member had closed by then.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from tests.sim.members.job import POINTER, Checkpoint, Job
from tests.sim.members.member import Member
from tests.sim.shown import Shown, differences
from tests.sim.storage import Storage
from tests.sim.trace import Finding
from tests.sim.virtual import MACHINE


class Judge:
    """Of one history."""

    def __init__(self, job: Job, storage: Storage, chance: random.Random) -> None:
        self._job = job
        self._storage = storage
        self._chance = chance
        self._step = 0
        """Of the latest checkpoint that the pointer has named."""
        self._shown_s = 0.0
        """Since when it does."""
        self._given_up: dict[str, int] = {}
        """Member → how many checkpoints there were when an operator went on without what it had."""
        self._is_loss_forgotten = False
        self._replaced = set[int]()
        """Checkpoints that the pointer has named, and does not any more since an older one came."""
        self.pointers = 0
        """How often another one was seen."""

    def gives_up(self, member: Member) -> None:
        """An operator goes on without what that one had, of which nobody knows whether it will
        come; what it has lost is forgotten with it.
        """
        self._given_up[member.node] = len(self._job.checkpoints) + 1
        self._is_loss_forgotten |= member.lost > 0

    def forgets_loss(self, member: Member) -> None:
        """The same, of what a member has lost with its RAM tier."""
        self.gives_up(member)
        self._is_loss_forgotten = True

    def look(self) -> None:
        """At all that others could see since the last look, and at what a loss of power would
        leave.
        """
        states = list(self._storage.shown)
        self._storage.shown.clear()
        for shown in states:
            self._judge_state(shown)
        if states:
            self._judge_named(self._storage.after_power_loss(self._chance, any_order=True), "POWER")

    def _judge_state(self, shown: Shown) -> None:
        self._judge_named(shown, "POINTER")
        step = self._step_of(shown)
        if step < self._step and not (self._is_untold(step) or self._is_replaced_at_home(step)):
            raise Finding("BACK", f"the pointer names step {step} after step {self._step}")
        if step < self._step:
            self._replaced.add(self._step)
        if step != self._step:
            self.pointers += 1
            self._shown_s = MACHINE.moment_s
        self._step = step

    def _is_untold(self, step: int) -> bool:
        """Whether who made the pointer ended before it could tell of it, and was forgotten, or who
        brings the older one was (S484).
        """
        author = next(one.told_by for one in self._job.checkpoints if one.step == self._step)
        older = next((one.told_by for one in self._job.checkpoints if one.step == step), None)
        return (
            author is not None
            and any(one is not None and one[0].node in self._given_up for one in (author, older))
            and author[0].view.published_s <= self._shown_s
        )

    def _is_replaced_at_home(self, step: int) -> bool:
        """Whether who made that older one has made a later one, too: what a member replaces itself
        is not given up, and comes when a loss is forgotten (S484).
        """
        author = next((one.told_by for one in self._job.checkpoints if one.step == step), None)
        later = [one for one in self._job.checkpoints if one.step > self._step]
        return bool(self._given_up) and author in [one.told_by for one in later if one.told_by]

    def _step_of(self, shown: Shown) -> int:
        text = shown.get(POINTER.encode())
        return 0 if text is None else int(text.decode().partition("-")[2])

    def _judge_named(self, shown: Shown, oracle: str) -> None:
        pointer = shown.get(POINTER.encode())
        for number, checkpoint in enumerate(self._job.checkpoints, 1):
            is_named = pointer == checkpoint.directory.encode()
            if is_named or checkpoint.metadata.encode() in shown:
                self._judge_whole(shown, checkpoint, number, oracle, is_named=is_named)

    def _judge_whole(
        self, shown: Shown, checkpoint: Checkpoint, number: int, oracle: str, *, is_named: bool
    ) -> None:
        if self._is_change_lost(checkpoint, number, is_named=is_named):
            return
        wanted = {
            path.encode(): content
            for path, content in checkpoint.files.items()
            if not self._is_given_up(checkpoint.owners[path], number)
        }
        got = {path: shown[path] for path in wanted if path in shown}
        if got != wanted and not checkpoint.is_uncovered:
            what = "the pointer names" if is_named else "there is .metadata of"
            raise Finding(oracle, f"{what} {checkpoint.directory}: {differences(got, wanted)}")

    def _is_change_lost(self, checkpoint: Checkpoint, number: int, *, is_named: bool) -> bool:
        """Whether what took it from the pointer's name was lost with a RAM tier: removals do not
        wait for that (S160).
        """
        if not checkpoint.is_going:
            return False
        if self._is_loss_forgotten:
            return True  # what was withheld for it comes in its order (S416)
        changes = [checkpoint.remover]
        if is_named:
            changes = [one.told_by for one in self._job.checkpoints[number:]]
        return any(
            one is not None and (one[0].lost > one[1] or self._is_given_up(one, number))
            for one in changes
        )

    def _is_given_up(self, who: tuple[Member, int] | None, number: int) -> bool:
        return who is not None and number <= self._given_up.get(who[0].node, 0)

    def judge_waited(self, files: dict[str, bytes]) -> None:
        """Somebody has waited until all other members had persisted these (S168)."""
        wanted = {path.encode(): content for path, content in files.items()}
        left = self._storage.after_power_loss(self._chance, any_order=True)
        for shown in (self._storage.visible(), left):
            got = {path: shown[path] for path in wanted if path in shown}
            if got != wanted:
                raise Finding("STATUS", f"a wait for others has ended: {differences(got, wanted)}")

    # -- at the end

    def judge_end(self, members: Iterable[Member]) -> None:
        """What nobody has lost is there."""
        shown = self._storage.visible()
        gone = {one.node for one in members if one.is_gone}
        for number, checkpoint in enumerate(self._job.checkpoints, 1):
            told_by = None if checkpoint.step in self._replaced else checkpoint.told_by
            if told_by and self._is_kept(told_by, gone, number) and self._step < checkpoint.step:
                raise Finding("LOST", f"the pointer names step {self._step}, not {checkpoint.step}")
            if checkpoint.is_going:
                continue
            wanted = {
                path.encode(): content
                for path, content in checkpoint.files.items()
                if self._is_kept(checkpoint.owners[path], gone, number)
            }
            got = {path: shown[path] for path in wanted if path in shown}
            if got != wanted:
                raise Finding("LOST", differences(got, wanted))

    def _is_kept(self, who: tuple[Member, int], gone: set[str], number: int) -> bool:
        member, lost = who
        return member.node not in gone and member.lost == lost
