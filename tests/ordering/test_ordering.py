"""The ordering test: at every instant the backing directory shows a state that the application had.

The backing directory is the faulty file system, which journals all that becomes visible; faults
come at random, from a seed.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.ordering.history import Application, check
from tests.ordering.training import TrainingRun
from tests.rig.faultfs import FaultFs
from tests.rig.journal import Tree, replay, tree_of
from tests.rig.mounts import AcpfsMount, MakeMount

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount]
ROUNDS = 25
ROUNDS_IN_CI = 12
"""The longer ones where operations are asked for (`tools/test random`)."""
QUICK = {
    "retry_delay_min": 0.02,
    "retry_delay_max": 0.2,
    "attr_timeout": 0.1,
    "max_dirty_age": 0,
    "no_keep_last_persisted": True,
}
STAGING = ".acpfs/*"


def passing_errors(faults: FaultFs, chooser: random.Random) -> None:
    """Errors of every kind at every kind of call, a bounded number of times."""
    for error in ("EIO", "ENOSPC", "ESTALE", "ETIMEDOUT"):
        ops = [
            "write",
            "fsync",
            "create",
            "rename",
            "unlink",
            "mkdir",
            "rmdir",
            "link",
            "symlink",
            "fsyncdir",
            "setattr",
            "setxattr",
        ]
        faults.fail(error, ops, probability=0.05, seed=chooser.randrange(1 << 30), times=25)


def lost_answers(faults: FaultFs, chooser: random.Random) -> None:
    """The call was carried out, but the answer is an error: as when a server dies."""
    ops = ["rename", "unlink", "mkdir", "rmdir", "link", "symlink"]
    faults.rule("lose", ops=ops, probability=0.15, seed=chooser.randrange(1 << 30), times=40)


def random_delays(faults: FaultFs, chooser: random.Random) -> None:
    """Streams of very different speed."""
    faults.slow(
        0.0, ["write", "fsync"], jitter_s=0.03, probability=0.5, seed=chooser.randrange(1 << 30)
    )
    faults.slow(0.2, ["write"], probability=0.02, seed=chooser.randrange(1 << 30))


def torn_writes(faults: FaultFs, chooser: random.Random) -> None:
    """Half of a write arrives, with or without an error."""
    faults.rule("tear", ops=["write"], probability=0.1, seed=chooser.randrange(1 << 30), times=40)
    faults.rule("short", ops=["write"], probability=0.1, seed=chooser.randrange(1 << 30), times=40)


def no_space_for_a_while(faults: FaultFs, chooser: random.Random) -> None:
    """Writes find the disk full 60 times in a row."""
    faults.fail("ENOSPC", ["write", "create"], times=60)


def nothing(_faults: FaultFs, _chooser: random.Random) -> None:
    """A well-behaved backing directory."""


FAULTS = [nothing, random_delays, passing_errors, lost_answers, torn_writes, no_space_for_a_while]


def training(mount: AcpfsMount, application: Application, seed: int) -> TrainingRun:
    """Everything that is in order over this backing file system."""
    exchange: bool = mount.status()["features"]["rename_exchange"]
    assert exchange or AcpfsMount.lay_backing is not None
    return TrainingRun(application, seed, exchange=exchange)


def finish(mount: AcpfsMount, faults: FaultFs, application: Application) -> None:
    """Drain, and hold everything that was ever visible against the history."""
    mount.flush()
    instants = check(faults.journal(), application.states)
    assert tree_of(faults.source) == application.states[-1]
    assert tree_of(mount.path) == application.states[-1]
    assert instants > 0


@clause("S6", "S7", "S8", "S9", "S11", "S23", "S25")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_every_instant_is_a_state_of_the_application(
    transport: str,
    make_mount: MakeMount,
    fault_fs: FaultFs,
    seed: int,
    fault: Callable[[FaultFs, random.Random], None],
    request: pytest.FixtureRequest,
) -> None:
    rounds = ROUNDS if request.config.getoption("--ops") else ROUNDS_IN_CI
    chooser = random.Random(seed)
    mount = make_mount(fault_fs.path, transport, **QUICK)
    application = Application(mount.path)
    run = training(mount, application, seed)
    fault(fault_fs, chooser)
    for number in range(rounds):
        run.round()
        if number % 8 == 7:
            mount.flush()
    finish(mount, fault_fs, application)
    mount.umount()
    fault_fs.clear()
    mount.start()  # what could not be cleaned up because of faults is by now
    mount.umount()
    assert mount.leaks() == []


@clause("S6", "S140", "S141")
def test_what_the_guard_holds_is_the_only_exception(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, seed: int
) -> None:
    """With the guard on: all but deleted checkpoints is a state of the application, in order, over
    kill -9; and nothing of them is torn.
    """
    options = {name: value for name, value in QUICK.items() if name != "no_keep_last_persisted"}
    mount = make_mount(fault_fs.path, transport, **options)
    application = Application(mount.path)
    run = training(mount, application, seed)
    random_delays(fault_fs, random.Random(seed))
    for number in range(ROUNDS // 2):
        run.round()
        if number == ROUNDS // 4:
            mount.kill()
            mount.start()
    mount.flush()
    released = (
        mount.status()["counters"]["guard_released_newer"] + mount.ask("release")["checkpoints"]
    )
    assert released, "nothing was held"
    mount.flush()
    assert (
        check(fault_fs.journal(), application.states, guarded=lambda path: path.startswith("iter_"))
        > 0
    )
    assert tree_of(fault_fs.source) == application.states[-1]


@clause("S6", "S3")
def test_order_holds_when_everything_hangs_in_between(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, seed: int
) -> None:
    mount = make_mount(fault_fs.path, transport, **QUICK)
    application = Application(mount.path)
    run = training(mount, application, seed)
    for _ in range(4):
        run.round()
        os.listdir(mount.path)  # what is known of the top directory goes on being known
        fault_fs.freeze()
        run.round()
        run.round()
        fault_fs.thaw()
        run.round()
    finish(mount, fault_fs, application)


@clause("S6", "S22")
def test_order_holds_over_kill_9_and_remount(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, seed: int
) -> None:
    chooser = random.Random(seed)
    mount = make_mount(fault_fs.path, transport, **QUICK)
    application = Application(mount.path)
    run = training(mount, application, seed)
    fault_fs.slow(0.0, ["write", "fsync", "rename"], jitter_s=0.02)
    for _ in range(4):
        for _ in range(chooser.randrange(1, 5)):
            run.round()
        mount.kill()
        mount.start()
        assert tree_of(mount.path) == application.states[-1], (
            "the next mount shows all that was closed"
        )
    fault_fs.clear()
    finish(mount, fault_fs, application)


@clause("S6")
def test_several_applications_each_in_order(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, seed: int
) -> None:
    mount = make_mount(fault_fs.path, transport, **QUICK)
    random_delays(fault_fs, random.Random(seed))
    applications = []
    for name in ("job_a", "job_b", "job_c"):
        (mount.path / name).mkdir()
        applications.append(Application(mount.path / name))
    runs = [
        training(mount, application, seed + number)
        for number, application in enumerate(applications)
    ]
    threads = [threading.Thread(target=_train, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mount.flush()
    for application in applications:
        check(fault_fs.journal(), application.states, below=application.root.name + "/")
        assert tree_of(fault_fs.source / application.root.name) == application.states[-1]


def _train(run: TrainingRun) -> None:
    for _ in range(10):
        run.round()


@clause("S6")
def test_tracker_never_points_at_a_checkpoint_that_is_not_there(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    """The same in the words of a training job, without the history."""
    mount = make_mount(fault_fs.path, transport, **QUICK)
    fault_fs.slow(0.3, ["write"], glob=STAGING, probability=0.3, seed=1)
    shards = 4
    for number in range(6):
        checkpoint = mount.path / f"iter_{number}"
        checkpoint.mkdir()
        for shard in range(shards):
            (checkpoint / f"shard_{shard}").write_bytes(bytes([number]) * 100_000)
        (mount.path / "latest_checkpointed_iteration.txt").write_text(str(number))
    mount.flush()
    seen = set()
    for directory, contents in _trackers(fault_fs.journal()):
        assert len([p for p in contents if p.startswith(directory + "/shard_")]) == shards
        seen.add(directory)
    assert f"iter_{number}" in seen


def _trackers(journal: list[dict[str, Any]]) -> Iterator[tuple[str, Tree]]:
    digests = {_digest(str(n).encode()): f"iter_{n}" for n in range(10)}
    for _record, tree in replay(journal):
        tracker = tree.get("latest_checkpointed_iteration.txt")
        if tracker is not None:
            yield digests[tracker[1]], tree


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def test_the_check_finds_a_wrong_order(tmp_path: Path) -> None:
    """The test of the test: a plain directory changed out of order is found out."""
    with FaultFs(tmp_path / "disk", tmp_path / "seen", record=tmp_path / "journal") as faults:
        application = Application(tmp_path)
        application.states += [
            {"a": ("file", _digest(b"A"))},
            {"a": ("file", _digest(b"A")), "b": ("file", _digest(b"B"))},
        ]
        hidden = faults.path / ".acpfs"
        hidden.mkdir()
        for name in ("b", "a"):
            (hidden / name).write_bytes(name.upper().encode())
        (hidden / "a").rename(faults.path / "a")
        assert check(faults.journal(), application.states) == 1
        (faults.path / "a").unlink()
        (hidden / "b").rename(faults.path / "b")
        with pytest.raises(AssertionError, match="nearest is state"):
            check(faults.journal(), application.states)


def test_a_plain_file_system_passes_but_for_half_written_files(tmp_path: Path) -> None:
    """Writing straight to the backing directory shows half-written files, and the check says so."""
    with FaultFs(tmp_path / "disk", tmp_path / "seen", record=tmp_path / "journal") as faults:
        application = Application(faults.path)
        application.mkdir("d")
        application.symlink("d", "s")
        application.rename("d", "e")
        check(faults.journal(), application.states)
        application.save("f", b"whole")
        with pytest.raises(AssertionError, match="visible: f"):
            check(faults.journal(), application.states)
