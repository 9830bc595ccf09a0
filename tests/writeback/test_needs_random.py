"""Random words and pointers, with workers that die in between: each pointer has what was said
before it was made, and no other (S282).

Mutants of the gate and of what it keeps, each of which must be found.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from acpfs.config import ClusterOrder
from acpfs.ram.state import StateDatabase
from acpfs.types import ROOT, Ino, Seq
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.needs import Needs
from acpfs.writeback.log.ops import Op, OpKind
from acpfs.writeback.members.gate import Gate
from tests.rig.runtime import REAL
from tests.writeback.given_pointers import GivenPointers
from tests.writeback.test_cluster import is_pointer, takes_pointer

clause = pytest.mark.clause
INOS = tuple(Ino(number) for number in range(2, 6))
NODES = ("b", "c", "d")
SEEDS = 8


class History:
    """One worker after the other over one state; `said` and `taken` are what must be."""

    def __init__(self, directory: Path, rng: random.Random, mutant: type[Gate]) -> None:
        self._directory = directory
        self.rng = rng
        self._mutant = mutant
        self.said: dict[Ino, tuple[str, ...]] = {}
        self.taken: dict[int, tuple[str, ...]] = {}
        self._begin()

    def _begin(self) -> None:
        self.state = StateDatabase(self._directory / "state", REAL)
        self.log = OperationLog(self.state, REAL.clock)
        self.gate = self._mutant(
            self.log, GivenPointers(is_pointer, takes_pointer), ClusterOrder.POINTERS
        )
        self.log.follow(self.gate.note)
        if self.rng.random() < 0.5:
            self.gate.begin()  # the engine begins some time after the worker serves

    def step(self) -> None:
        getattr(
            self,
            self.rng.choice(
                (
                    "say",
                    "say",
                    "unsay",
                    "point",
                    "point",
                    "write",
                    "again",
                    "take_back",
                    "persist",
                    "die",
                    "begin",
                )
            ),
        )()
        self.state.commit()

    def say(self) -> None:
        ino = self.rng.choice(INOS)
        nodes = tuple(self.rng.sample(NODES, self.rng.randint(1, 3)))
        self.said[ino] = nodes
        self.log.needs.tell(ino, nodes)

    def unsay(self) -> None:
        ino = self.rng.choice(INOS)
        self.said.pop(ino, None)
        self.log.needs.tell(ino, None)

    def point(self) -> None:
        op = self._append(b"latest")
        if op.ino in self.said:
            self.taken[op.seq] = self.said.pop(op.ino)

    def write(self) -> None:
        self._append(b"plain")

    def _append(self, name: bytes) -> Op:
        return self.log.append(OpKind.SYMLINK, self.rng.choice(INOS), parent=ROOT, name=name)

    def _any(self) -> Op | None:
        return self.rng.choice(list(self.log)) if len(self.log) else None

    def again(self) -> None:
        """The last close of a descriptor has come."""
        if op := self._any():
            self.log.on_append(op)

    def take_back(self) -> None:
        op = self.log.newest()
        if op is None or self.log.last_of(op.ino) is not op:
            return
        if op.seq in self.taken:
            self.said.setdefault(op.ino, self.taken.pop(op.seq))
        self.log.needs.give_back(op)
        self.log.withdraw(op)

    def persist(self) -> None:
        if op := self._any():
            self.taken.pop(op.seq, None)
            self.log.remove(op)

    def die(self) -> None:
        self.state.close()
        self._begin()

    def begin(self) -> None:
        self.gate.begin()

    def check(self) -> None:
        """That no pointer waits for fewer nodes, or others, than its writer said before."""
        assert {
            ino: nodes for ino in INOS if (nodes := self.log.needs.told(ino)) is not None
        } == self.said
        assert self.log.needs._taken == self.taken


def play(directory: Path, seed: int, mutant: type[Gate] = Gate, steps: int = 80) -> None:
    directory.mkdir()
    history = History(directory, random.Random(seed), mutant)
    for _ in range(steps):
        history.step()
        history.check()
    history.state.close()


def play_all(directory: Path, mutant: type[Gate] = Gate) -> None:
    for seed in range(SEEDS):
        play(directory / str(seed), seed, mutant)


@clause("S282")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_pointer_has_what_was_said_before_it(tmp_path: Path, seed: int) -> None:
    play(tmp_path / "run", seed)


class TakesWheneverNoted(Gate):
    def note(self, op: Op) -> None:
        self._newest_seq = Seq(op.seq - 1)
        super().note(op)


class TakesForAll(Gate):
    def note(self, op: Op) -> None:
        self._log.needs.take(op)
        super().note(op)


class TakesWhenBegun(Gate):
    def note(self, op: Op) -> None:
        if self._begun:
            super().note(op)


@clause("S282")
@pytest.mark.parametrize("mutant", [TakesWheneverNoted, TakesForAll, TakesWhenBegun])
def test_mutants_of_the_gate_are_found(tmp_path: Path, mutant: type[Gate]) -> None:
    with pytest.raises(AssertionError):
        play_all(tmp_path, mutant)


@clause("S282")
@pytest.mark.parametrize("forgets", ["done", "give_back", "_save"])
def test_mutants_of_what_is_kept_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgets: str
) -> None:
    if forgets == "_save":
        monkeypatch.setattr(
            Needs, forgets, lambda self, seq, nodes: self._taken.__setitem__(seq, nodes)
        )
    else:
        monkeypatch.setattr(Needs, forgets, lambda _self, _what: None)
    with pytest.raises(AssertionError):
        play_all(tmp_path)
