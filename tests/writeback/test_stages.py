"""How far an operation has come: only along the table of steps, whatever happens."""

from __future__ import annotations

import errno
import itertools
import random
from pathlib import Path

import pytest
import trio._core._run as trio_run

from acpfs.writeback.log.ops import Op
from acpfs.writeback.log.stages import TABLE, WAYS, Aside, IllegalStepError, Stage, Step
from tests.writeback.conftest import Run
from tests.writeback.memory_lower import FailNth, MemoryLower
from tests.writeback.test_guard_random import settle
from tests.writeback.test_random import Application, Mortal, assert_arrived, faults, live_and_die
from tests.writeback.world import World

SEEDS = 8
OFTEN = {
    (Stage.LOGGED, Step.CLOSED),
    (Stage.TENTATIVE, Step.CONFIRMED),
    (Stage.LOGGED, Step.OUTGROWN),
    (Stage.UNSEALED, Step.SEALED),
    (Stage.LOGGED, Step.BEGUN),
    (Stage.UNDER_WAY, Step.CARRIED_OUT),
    (Stage.UNDER_WAY, Step.FAILED),
    (Stage.IN_DOUBT, Step.BEGUN),
}
"""What these histories are full of; the rest takes chances, or tests of its own."""


class Closer(Application):
    """Closes that may not be the last, and files that outgrow RAM."""

    def __init__(self, world: World, rng: random.Random) -> None:
        super().__init__(world, rng)
        self._unfinished: list[Op] = []

    def store(self) -> None:
        super().store()
        op = self.world.log.newest()
        if op is not None and op.version is not None and op.stage is Stage.LOGGED:
            steps = self.rng.choice(
                ((), (Step.CLOSED,), (Step.OUTGROWN,), (Step.OUTGROWN, Step.CLOSED))
            )
            for step in steps:
                op.take(step)
            self._unfinished += [op] if steps else []

    def act(self) -> None:
        if self._unfinished and self.rng.random() < 0.3:
            self.finish(self._unfinished.pop(self.rng.randrange(len(self._unfinished))))
        super().act()

    def finish(self, op: Op) -> None:
        """In either order, if it is still to be done, and by this worker."""
        if self.world.log.get(op.seq) is op:
            for step in self.rng.sample((Step.CONFIRMED, Step.SEALED), 2):
                if op.tentative if step is Step.CONFIRMED else op.unsealed:
                    op.take(step)
            self.world.log.on_append(op)

    def finish_all(self) -> None:
        for op in self._unfinished:
            self.finish(op)
        self._unfinished.clear()


def live(tmp_path: Path, seed: int) -> None:
    """Work, faults and deaths on virtual time, until all has arrived."""
    rng = random.Random(3000 + seed)
    lower = MemoryLower()
    (lower.fault,) = faults(rng, 0.1, 0.0)
    mortal = Mortal(lower)
    world = World(tmp_path, mortal, keep_last_persisted=seed % 2 == 1)
    application = Closer(world, rng)
    live_and_die(application, mortal, lower, rounds=15, calls_max=15)
    application.finish_all()
    lower.fault = lambda _label, _path: None
    world.engine.retry()
    settle(world)
    assert_arrived(world, lower)


def test_random_histories_take_the_steps_of_the_table_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: set[tuple[Stage, Step]] = set()
    take = Op.take

    def noted(op: Op, step: Step) -> None:
        taken.add((op.stage, step))
        take(op, step)

    monkeypatch.setattr(Op, "take", noted)
    for seed in range(SEEDS):
        (tmp_path / str(seed)).mkdir()
        live(tmp_path / str(seed), seed)
    assert OFTEN <= taken <= TABLE.keys()


@pytest.mark.parametrize(
    ("stage", "step"), sorted(set(itertools.product(Stage, Step)) - TABLE.keys(), key=str)
)
def test_what_is_not_in_the_table_is_refused(world: World, stage: Stage, step: Step) -> None:
    op = world.mkdir("d")
    op.stage = stage
    with pytest.raises(IllegalStepError, match=stage.name):
        op.take(step)
    assert op.stage is stage


@pytest.mark.parametrize(
    ("now", "then"),
    [(now, then) for now, then in itertools.product(Aside, Aside) if then not in WAYS[now]],
)
def test_no_operation_is_set_aside_twice(world: World, now: Aside, then: Aside) -> None:
    op = world.mkdir("d")
    op.aside = now
    with pytest.raises(IllegalStepError, match=f"from {now.value} to {then.value}"):
        op.put(then)
    assert op.aside is now


def test_attributes_given_after_others_that_a_dead_worker_had_given_are_stored(
    world: World, run: Run
) -> None:
    """Found by reading: a look that failed had the operation be one that nothing was done for, and
    what was folded in was never given.
    """
    world.mkdir("d")
    run(world.drain)
    op = world.setattr("d", permissions=0o700)
    assert op is not None
    with world.engine.section():
        world.log.mark_begun(op)
        world.lower.apply((b"d",), op.meta)
        world.log.mark_committed(op)
    world.restart()
    world.lower.fault = FailNth("lstat", 1, errno.EIO)
    run(world.run_for, 0.01)
    assert world.engine.statistics().counters.retries
    world.setattr("d", permissions=0o750)
    run(world.drain)
    assert world.lower.inode("d").mode & 0o777 == 0o750


def test_what_was_not_handed_over_is_in_no_doubt(
    world: World, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the table of steps: a look at moves before it failed, and from then on only carrying
    it out was certain.
    """
    world.mkdir("d")
    op = world.log.front(1)[0]
    looks = FailNth("look", 1, errno.EIO)
    monkeypatch.setattr(world.engine._committer, "_catch_up", lambda _op: looks("look", ()))
    run(world.run_for, 0.01)
    assert (op.tries, op.begun) == (1, False)
    world.rmdir("d")
    run(world.drain)
    assert not world.lower.calls["mkdir"]


@pytest.mark.clause("S161")
def test_a_removal_that_is_put_off_is_withheld_when_a_member_is_missing(
    world: World, run: Run
) -> None:
    world.store("f", b"1")
    run(world.drain)
    gate = world.engine.gate
    gate.begin()
    removal = world.unlink("f")
    run(world.run_for, 1.0)
    assert removal.aside.name == "PUT_OFF"
    (gated,) = gate.gated()
    assert gate.withholds(gated)
    assert removal.aside.name == "WITHHELD"
    gate.passes(gated)
    assert removal.aside.name == "NONE"
    run(world.drain)
    assert not world.lower.visible()


def test_that_a_file_is_staged_is_recorded_with_the_word_that_its_commit_begins(
    world: World, run: Run
) -> None:
    """So a close comes to be persisted in four transactions: closed; staged, and begun; carried
    out; persisted. In five where the engine's look for what else is to be streamed comes before
    the one for what is to be committed: trio draws lots which of two tasks goes first. Where many
    files are drained at once they share some of these.
    """
    together = [(True, 1, False), (False, 1, False), (False, 0, True)]
    apart = [(True, 0, False), (False, 1, False), (False, 1, False), (False, 0, True)]
    found = []
    for number in range(8):
        trio_run._r.seed(number)  # or all of them are drawn by the test's seed
        found.append(_stages(world, run, f"f{number}"))
    assert together in found
    assert all(one in (together, apart) for one in found)


def _stages(world: World, run: Run, name: str) -> list[tuple[bool, int, bool]]:
    """What each transaction of a file's drain says: staged, how often begun or carried out, and
    persisted.
    """
    world.store(name, b"x")
    transactions: list[list[str]] = [[]]

    def traced(sql: str) -> None:
        transactions[-1].append(sql)
        if sql == "COMMIT":
            transactions.append([])

    world.state._db.set_trace_callback(traced)
    run(world.drain)
    world.state._db.set_trace_callback(None)
    stages = [
        (
            any("INTO version" in sql for sql in statements),
            sum(sql.startswith("UPDATE op SET committed") for sql in statements),
            any(sql.startswith("DELETE FROM op ") for sql in statements),
        )
        for statements in transactions
    ]
    return [stage for stage in stages if any(stage)]
