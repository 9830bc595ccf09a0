"""What must never be so in a job, judged by what coordinators say and ranks do; nothing here looks
into either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from acpfs.training.messages import Message, Publish, Resume, Save, Settle, Stop


class BrokenRuleError(Exception):
    """Named by its first word."""


@dataclass
class Oracles:
    """Of one history."""

    done: Callable[[int], int]
    """Updates that a rank has done."""
    acts: dict[int, int] = field(default_factory=dict)
    """Term → the coordinator that commands in it."""
    steps: dict[tuple[int, int], int] = field(default_factory=dict)
    """Term and generation → the step in which survivors meet.

    Two sides may each have one; one saves.
    """
    told: dict[tuple[int, int], int] = field(default_factory=dict)
    """Rank and generation → the same."""
    published: set[int] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)

    def says(self, coordinator: int, term: int, generation: int, message: Message) -> None:
        """A coordinator gives a command to members."""
        if not isinstance(message, Stop | Settle | Save | Publish | Resume):
            return
        known = self.acts.setdefault(term, coordinator)
        if known != coordinator:
            self._is_broken(
                f"ACTIVE: coordinators {known} and {coordinator} both act in term {term}"
            )

        if isinstance(message, Settle):
            step = self.steps.setdefault((term, generation), message.step)
            if step != message.step:
                self._is_broken(f"STEP: {message.step} and {step} in generation {generation}")

    def settles(self, rank: int, generation: int, step: int) -> None:
        known = self.told.setdefault((rank, generation), step)
        if known != step:
            self._is_broken(
                f"STEP: rank {rank} is told {step}, and was told {known} in generation {generation}"
            )

    def saves(self, rank: int, generation: int, save: Save, done: int) -> None:
        self.settles(rank, generation, save.step)
        if done != save.step:
            self._is_broken(f"SAVE: rank {rank} is to save step {save.step}, and is at {done}")

    def publishes(self, rank: int, publish: Publish) -> None:
        step = publish.manifest.step
        for shard, writer in publish.manifest.cover.items():
            if self.done(writer) != step:
                self._is_broken(f"PUBLISH: {shard} of rank {writer} is not of step {step}")
        self.published.add(step)
        if len(self.published) > 1:
            self._is_broken(f"TWICE: checkpoints of steps {sorted(self.published)} are published")

    def outdated(self, text: str) -> None:
        self._is_broken(f"TERM: {text}")

    def holds(self, text: str) -> None:
        self._is_broken(f"HOLD: {text}")

    def leaves(self, rank: int, ended: str, *, may_lack: bool) -> None:
        """How a rank ended of a job to which nothing happened but deaths, of which it can save
        all.
        """
        fine = ("the end of its loop", "killed", "told to leave: the gasp", "told to leave: no up")
        if not ended.startswith((*fine, *(["told to leave: no survivor"] if may_lack else []))):
            self._is_broken(f"MISSING: rank {rank} ended: {ended}")

    def crowds(self, text: str) -> None:
        self._is_broken(f"PROCESS: {text}")

    def ends_early(self, text: str) -> None:
        self._is_broken(f"DONE: {text}")

    def mixes(self, text: str) -> None:
        self._is_broken(f"NAME: {text}")

    def lives(self, text: str) -> None:
        self._is_broken(f"LIVENESS: {text}")

    def _is_broken(self, text: str) -> None:
        self.broken.append(text)
        raise BrokenRuleError(text)
