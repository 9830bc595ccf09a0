"""The reference-model test: random operations on two file systems side by side, compared after
every step.

One side is a plain directory. The backing directory is compared too, after drains. A failure prints
the seed and the operations before it; with `--seed` the same operations run again, `--ops` says how
many.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.model.operations import Generator, Operation, Side
from tests.model.snapshot import differences, snapshot
from tests.rig.mounts import AcpfsMount, MakeMount

OPS = 2_000
COMPARE_EVERY = 250
DRAIN_EVERY = 1_000
SHOWN = 25


class Pair:
    """Two sides and what was done to them."""

    def __init__(self, tested: Path, reference: Path, seed: int) -> None:
        self.tested = Side(tested)
        self.reference = Side(reference)
        self._done: deque[str] = deque(maxlen=SHOWN)
        self._seed = seed

    def run(self, operations: Iterable[Operation], number: int = 0) -> None:
        """Do operations on both sides; stop at the first that ends differently."""
        for operation in operations:
            number += 1
            expected = self.reference.do(operation)
            got = self.tested.do(operation)
            self._done.append(f"{number}: {operation} → {str(expected)[:80]}")
            if expected != got:
                self._fail(f"expected {_short(expected)}\ngot      {_short(got)}")

    def compare(self, what: Path, why: str) -> None:
        """The whole tree at `what` is the reference's."""
        different = differences(snapshot(what), snapshot(self.reference.root))
        if different:
            self._fail(f"{why}: ({what} ≠ reference)\n" + "\n".join(different[:20]))

    def _fail(self, text: str) -> None:
        pytest.fail(f"seed {self._seed}\n" + "\n".join(self._done) + "\n" + text)


def _short(outcome: object) -> str:
    text = repr(outcome)
    return text if len(text) < 400 else f"{text[:200]} … {text[-150:]} ({len(text)} characters)"


def run_model(
    tested: Path, reference: Path, seed: int, count: int, mount: AcpfsMount | None = None
) -> None:
    pair = Pair(tested, reference, seed)
    operations = iter(Generator(seed))
    chooser = random.Random(seed)
    for start in range(0, count, COMPARE_EVERY):
        pair.run(itertools.islice(operations, min(COMPARE_EVERY, count - start)), start)
        pair.compare(tested, "mount")
        if mount is None:
            continue
        if (start + COMPARE_EVERY) % DRAIN_EVERY == 0:
            pair.tested.close_all()
            pair.reference.close_all()
            mount.flush()
            pair.compare(
                mount.backing / tested.relative_to(mount.path), "backing directory after the drain"
            )
            assert mount.ask("doctor") == {"items": []}, f"seed {seed}"
        elif chooser.random() < 0.3:
            mount.flush()
    pair.tested.close_all()
    pair.reference.close_all()


@pytest.mark.clause("S31")
def test_model_agrees_with_a_plain_directory(tmp_path: Path, seed: int) -> None:
    """The model itself: two plain directories never differ."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    run_model(tmp_path / "a", tmp_path / "b", seed, 3_000)


@pytest.mark.mount
@pytest.mark.timeout(1800)
@pytest.mark.clause("S1", "S13", "S34", "S35", "S36", "S39", "S41")
def test_mount_agrees_with_a_plain_directory(
    transport: str, make_mount: MakeMount, tmp_path: Path, seed: int, request: pytest.FixtureRequest
) -> None:
    count = request.config.getoption("--ops") or OPS
    for name in ("backing", "reference"):
        (tmp_path / name).mkdir()
    mount = make_mount(tmp_path / "backing", transport, attr_timeout=0.1, max_dirty_age=0)
    (mount.path / "root").mkdir()
    run_model(mount.path / "root", tmp_path / "reference", seed, count, mount)
    mount.umount()
    assert mount.leaks() == []
    assert (
        differences(snapshot(tmp_path / "backing" / "root"), snapshot(tmp_path / "reference")) == []
    )


@pytest.mark.mount
@pytest.mark.timeout(1800)
@pytest.mark.clause("S30", "S1", "S22")
def test_mount_agrees_over_remounts(
    transport: str, tmp_path: Path, seed: int, request: pytest.FixtureRequest
) -> None:
    """Everything is read from the backing directory again after each remount, so lower-layer paths
    are what is tested.
    """
    count = (request.config.getoption("--ops") or OPS) // 10
    for name in ("backing", "reference"):
        (tmp_path / name).mkdir()
    for round_number in range(4):
        round_seed = seed + round_number
        with AcpfsMount(
            tmp_path / "backing", tmp_path / "mnt", transport, attr_timeout=0.1
        ) as mount:
            snapshot(
                mount.path
            )  # exception X6: a file's other names count only when they are known
            run_model(mount.path, tmp_path / "reference", round_seed, count, mount)
        assert (
            differences(snapshot(tmp_path / "backing"), snapshot(tmp_path / "reference")) == []
        ), f"seed {round_seed}"


@pytest.mark.mount
@pytest.mark.timeout(1800)
@pytest.mark.clause("S30", "S33")
def test_mount_agrees_while_clean_files_leave_ram(
    transport: str, make_mount: MakeMount, tmp_path: Path, seed: int, request: pytest.FixtureRequest
) -> None:
    """A RAM tier that holds less than the test's files: what is clean is evicted, and read from the
    backing directory again.
    """
    count = (request.config.getoption("--ops") or OPS) // 5
    for name in ("backing", "reference"):
        (tmp_path / name).mkdir()
    mount = make_mount(tmp_path / "backing", transport, attr_timeout=0.1, ram="16M")
    run_model(mount.path, tmp_path / "reference", seed, count, mount)
    mount.umount()
    assert differences(snapshot(tmp_path / "backing"), snapshot(tmp_path / "reference")) == []
