"""The guard on real mounts: at every instant one whole checkpoint lies on the backing directory,
whatever the framework deletes when.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import xxhash

from tests.guard.orders import ORDERS, Files, Order, accelerate, expected, mindspore, same_name
from tests.rig.faultfs import FaultFs
from tests.rig.journal import Tree, replay, tree_of
from tests.rig.mounts import AcpfsMount, MakeMount

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount]
QUICK = {
    "retry_delay_min": 0.02,
    "retry_delay_max": 0.2,
    "attr_timeout": 0.1,
    "max_dirty_age": 0,
    "ram": "256M",
}
TRANSPORTS = pytest.mark.transports("libfuse", "native")
STEPS = 5


def files_of(chooser: random.Random) -> Files:
    return {
        name: chooser.randbytes(120_000 + chooser.randrange(9_000))
        for name in ("model.safetensors", "optimizer.pt", "rng.pth")
    }


class Job:
    """Saves in a framework's order, and knows every checkpoint that it ever made."""

    def __init__(self, order: Order, root: Path, chooser: random.Random) -> None:
        self.order = order
        self.save_dir = root / order.__name__
        self._random = chooser
        self.save_dir.mkdir()
        self.wholes: list[Tree] = []
        self._step = 0

    def save(self) -> None:
        self._step += 100
        files = files_of(self._random)
        name = self.order.__name__
        whole = expected(self.order, self._step, files)
        self.wholes.append(
            {
                f"{name}/{path}": ("file", xxhash.xxh3_128_hexdigest(data))
                for path, data in whole.items()
            }
        )
        self.order(self.save_dir, self._step, files)

    def is_safe(self, tree: Tree) -> bool:
        """Whether some checkpoint is there, whole and with the right bytes."""
        return any(whole.items() <= tree.items() for whole in self.wholes)

    def instants(self, faults: FaultFs) -> list[bool]:
        """From the first whole checkpoint on: whether there was one."""
        safe = [self.is_safe(tree) for _record, tree in replay(faults.journal())]
        return safe[safe.index(True) :]


def jitter(faults: FaultFs, chooser: random.Random) -> None:
    faults.slow(
        0.0,
        ["write", "fsync", "rename", "unlink"],
        jitter_s=0.01,
        probability=0.5,
        seed=chooser.randrange(1 << 30),
    )


@clause("S140")
@TRANSPORTS
def test_at_every_instant_a_whole_checkpoint_is_there(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, seed: int
) -> None:
    """In the orders of four frameworks, with a slow and failing backing directory, over kill -9 of
    worker and of everything.
    """
    chooser = random.Random(seed)
    mount = make_mount(fault_fs.path, transport, **QUICK)
    jobs = [Job(order, mount.path, chooser) for order in ORDERS]
    jitter(fault_fs, chooser)
    fault_fs.fail(
        "EIO",
        ["write", "rename", "unlink", "rmdir", "mkdir"],
        probability=0.05,
        seed=chooser.randrange(1 << 30),
        times=40,
    )
    for number in range(STEPS):
        for job in jobs:
            job.save()
        if number == 1:
            mount.flush(timeout_s=90)
        elif number == 2:
            fault_fs.clear()
            mount.kill()
            mount.start()
            jitter(fault_fs, chooser)
        elif number == 3 and transport == "native":
            mount.kill_worker()
    mount.flush(timeout_s=90)
    mount.wait_status(lambda status: not status["guarded"] and status["queue_length"] == 0, 60)
    for job in jobs:
        safe = job.instants(fault_fs)
        assert all(safe), (
            f"{job.order.__name__}: {safe.count(False)} of {len(safe)} instants without a "
            "checkpoint"
        )
    assert tree_of(fault_fs.source) == tree_of(mount.path)
    assert all(len(os.listdir(job.save_dir)) == 1 for job in jobs)


def test_without_the_guard_there_are_instants_without_a_checkpoint(
    make_mount: MakeMount, fault_fs: FaultFs, seed: int
) -> None:
    """The test of the test: so the one above sees what it is to see."""
    chooser = random.Random(seed)
    mount = make_mount(fault_fs.path, "libfuse", **QUICK, no_keep_last_persisted=True)
    jobs = [Job(order, mount.path, chooser) for order in (accelerate, mindspore)]
    for job in jobs * 2:
        job.save()
        mount.flush()
    assert not any(all(job.instants(fault_fs)) for job in jobs)


@clause("S140", "S141")
@TRANSPORTS
def test_deleted_and_the_next_one_half_written_while_nothing_answers(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, seed: int
) -> None:
    """The node is lost in the worst moment: what the backing directory has then can be loaded."""
    chooser = random.Random(seed)
    mount = make_mount(fault_fs.path, transport, **QUICK)
    job = Job(accelerate, mount.path, chooser)
    job.save()
    mount.flush()
    shutil.rmtree(job.save_dir / "checkpoint_100")
    assert os.listdir(job.save_dir) == []
    fault_fs.freeze()
    (job.save_dir / "checkpoint_200").mkdir()
    (job.save_dir / "checkpoint_200" / "model.safetensors").write_bytes(b"half")
    assert job.is_safe(tree_of(fault_fs.source))
    fault_fs.thaw()
    flushed = mount.ask("flush", paths=[], timeout_s=60)
    assert [held["path"] for held in flushed["guarded"]] == ["accelerate/checkpoint_100"]
    assert (fault_fs.source / "accelerate/checkpoint_200/model.safetensors").read_bytes() == b"half"
    status = mount.wait_status(
        lambda status: status["guarded"] and "model.safetensors" not in status["guarded"][0]["why"]
    )
    held = status["guarded"][0]
    assert held["files"] == 3
    assert held["size"] == sum(
        len(data)
        for data in (
            p.read_bytes() for p in (fault_fs.source / "accelerate/checkpoint_100").iterdir()
        )
    )
    assert held["until"] - held["since"] == pytest.approx(1800, abs=5)
    assert status["queue_length"] == 0
    assert status["guarded_operations"] == held["operations"] == 4
    assert "acpfs_guarded_bytes{" in mount.run("acpfs-ctl", str(mount.path), "metrics").stdout
    mount.kill()
    assert job.is_safe(tree_of(fault_fs.source))
    mount.start()
    mount.wait_status(lambda status: len(status["guarded"]) == 1)
    assert job.is_safe(tree_of(fault_fs.source))


@clause("S142")
def test_umount_leaves_what_is_held_and_the_next_mount_goes_on(
    transport: str, tmp_path: Path, make_mount: MakeMount
) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    mount = make_mount(backing, transport, **QUICK)
    job = Job(accelerate, mount.path, random.Random(1))
    job.save()
    mount.flush()
    shutil.rmtree(job.save_dir / "checkpoint_100")
    done = mount.run("acpfs", "umount", str(mount.path), "--timeout", "60")
    assert (
        "accelerate/checkpoint_100 is deleted, but no newer checkpoint is persisted" in done.stderr
    )
    assert job.is_safe(tree_of(backing))
    mount.start()
    assert os.listdir(job.save_dir) == []
    mount.wait_status(lambda status: len(status["guarded"]) == 1)
    shown = mount.run("acpfs-ctl", str(mount.path), "status").stdout
    assert "accelerate/checkpoint_100" in shown
    job.save()
    mount.umount()
    assert mount.leaks() == []
    assert [path.name for path in (backing / "accelerate").iterdir()] == ["checkpoint_200"]


@clause("S141", "S143")
def test_an_operator_or_the_time_lets_go(make_mount: MakeMount, tmp_path: Path) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    mount = make_mount(backing, "libfuse", **QUICK)
    for name in ("a", "b"):
        Job(accelerate, mount.path, random.Random(1)).save()
        (mount.path / "accelerate").rename(mount.path / name)
    mount.flush()
    shutil.rmtree(mount.path / "a")
    shutil.rmtree(mount.path / "b")
    mount.flush()
    mount.wait_status(
        lambda status: (
            {held["path"] for held in status["guarded"]} == {"a/checkpoint_100", "b/checkpoint_100"}
        )
    )
    assert mount.run("acpfs-ctl", str(mount.path), "release", check=False).returncode == 2
    assert (
        mount.run("acpfs-ctl", str(mount.path), "release", "nothing", check=False).returncode == 1
    )
    assert mount.ctl("release", "a") == {"checkpoints": 1}
    mount.wait_status(lambda status: status["queue_length"] == 0 and len(status["guarded"]) == 1)
    assert tree_names(backing) == ["b"]
    mount.run("acpfs", "umount", str(mount.path))
    mount.start(guard_time=0.01)
    mount.wait_status(lambda status: status["queue_length"] == 0 and not status["guarded"])
    assert tree_names(backing) == []
    assert mount.status()["counters"]["guard_released_time"] == 1


def tree_names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.name != ".acpfs")


@clause("S144")
@pytest.mark.transports("native")
def test_made_again_under_its_name_the_old_one_is_kept_until_the_new_one_is_whole(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    mount = make_mount(backing, transport, **QUICK, node_id="n1")
    job = Job(same_name, mount.path, random.Random(1))
    job.save()
    mount.flush()
    first = tree_of(backing)
    shutil.rmtree(job.save_dir / "checkpoint-1")
    (job.save_dir / "checkpoint-1").mkdir()
    (job.save_dir / "checkpoint-1" / "model.safetensors").write_bytes(b"new")
    mount.flush()
    kept = next((backing / ".acpfs/kept/n1").iterdir())
    assert {
        path.name: entry for path, entry in ((Path(p), e) for p, e in tree_of(kept).items())
    } == {Path(path).name: entry for path, entry in first.items() if entry[0] == "file"}
    held = mount.wait_status(lambda status: status["guarded"] and status["guarded"][0]["kept_as"])[
        "guarded"
    ][0]
    assert held["kept_as"] == os.fspath(kept.relative_to(backing))
    mount.abort()  # the node is lost, RAM tier and all
    mount.start()
    mount.wait_status(
        lambda status: any(str(kept.name) in warning for warning in status["warnings"])
    )
    assert kept.is_dir()
    shutil.rmtree(kept)
    job.save()
    mount.flush()
    job.save()
    mount.flush()
    mount.wait_status(lambda status: not status["guarded"] and status["queue_length"] == 0)
    assert list((backing / ".acpfs/kept/n1").iterdir()) == []
    assert job.wholes[-1].items() <= tree_of(backing).items()


@clause("S145")
def test_a_full_backing_directory_is_said_and_the_held_one_goes(
    tmp_path: Path, make_mount: MakeMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real full disk: a tmpfs that has room for one checkpoint and a half."""
    backing = tmp_path / "disk"
    backing.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "none", str(backing)], check=True)
    try:
        mount = make_mount(
            backing, "libfuse", **QUICK, environment={"ACPFS_GUARD_SPACE_PATIENCE": "1"}
        )
        job = Job(accelerate, mount.path, random.Random(1))
        job.save()
        mount.flush()
        job.save()
        mount.flush(timeout_s=90)
        assert mount.status()["counters"]["guard_released_space"] == 1
        assert "held deletions are carried out" in mount.log.read_text() + _daemon_log(mount)
        assert job.wholes[-1].items() <= tree_of(backing).items()
        mount.umount()
    finally:
        subprocess.run(["umount", "-l", str(backing)], check=False)


def _daemon_log(mount: AcpfsMount) -> str:
    return "".join(path.read_text() for path in mount.runtime_dir.rglob("*.log"))
