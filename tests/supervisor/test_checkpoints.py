"""Checkpoints as control shows them, against real mounts: from the first create to nothing left in
RAM.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.rig.mounts import AcpfsMount, MakeMount

pytestmark = [
    pytest.mark.mount,
    pytest.mark.transports("libfuse", "native"),
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]
SIZE = 1 << 20


@pytest.fixture
def mount(transport: str, tmp_path: Path, make_mount: MakeMount) -> AcpfsMount:
    (tmp_path / "backing").mkdir()
    return make_mount(tmp_path / "backing", transport, ram="64M", bandwidth="1K")


def the(mount: AcpfsMount, path: str) -> dict[str, Any]:
    (found,) = [report for report in mount.ask("checkpoints")["items"] if report["path"] == path]
    assert isinstance(found, dict)
    return found


def until(mount: AcpfsMount, path: str, state: str) -> dict[str, Any]:
    mount.wait_status(lambda _status: the(mount, path)["state"] == state)
    return the(mount, path)


@pytest.mark.clause("S113")
def test_the_life_of_a_checkpoint(mount: AcpfsMount, transport: str) -> None:
    directory = mount.path / "run/iter_0000100"
    directory.mkdir(parents=True)
    (directory / "a.pt").write_bytes(os.urandom(SIZE))
    with open(directory / "b.pt", "wb") as file:
        file.write(os.urandom(SIZE))
        file.flush()
        report = the(mount, "run/iter_0000100")
        assert (report["state"], report["step"], report["files"], report["persisted_files"]) == (
            "writing",
            100,
            2,
            0,
        )
    assert (
        the(mount, "run/iter_0000100")["state"] == "complete"
    )  # a byte of bandwidth: nothing is persisted
    if transport == "native":
        began_at = the(mount, "run/iter_0000100")["began_at"]
        os.kill(mount.status()["worker"]["pid"], signal.SIGKILL)
        mount.wait_status(lambda status: status["worker"]["number"] > 1)
        assert the(mount, "run/iter_0000100")["began_at"] == began_at
    mount.ask("set", key="bandwidth", value="0")
    mount.flush()
    report = the(mount, "run/iter_0000100")
    assert (report["state"], report["persisted_files"], report["bytes"], report["loads_from"]) == (
        "persisted",
        2,
        2 * SIZE,
        "ram",
    )
    assert report["began_at"] <= report["closed_at"] <= report["persisted_at"]
    assert 0 <= report["save_s"] <= report["persist_s"]
    assert report["estimated_load_s"] > 0
    mount.ask("wait", paths=["run"], verified=True, timeout_s=60)
    assert until(mount, "run/iter_0000100", "verified")["verified_at"] >= report["persisted_at"]
    mount.ask("evict", paths=["run/iter_0000100/a.pt"])
    assert the(mount, "run/iter_0000100")["loads_from"] == "mixed"
    mount.ask("evict", paths=["run"])
    report = the(mount, "run/iter_0000100")
    assert (report["state"], report["loads_from"], report["bytes"], report["files"]) == (
        "evicted",
        "backing",
        2 * SIZE,
        2,
    )
    shown = mount.run("acpfs-ctl", str(mount.path), "checkpoints", str(directory)).stdout
    assert "run/iter_0000100" in shown
    assert "evicted" in shown
    mount.umount()
    mount.start()  # only the written manifest knows of it, which has no sizes
    report = the(mount, "run/iter_0000100")
    assert (report["state"], report["loads_from"], report["bytes"], report["files"]) == (
        "evicted",
        "backing",
        2 * SIZE,
        2,
    )
    shutil.rmtree(directory)
    assert mount.ask("checkpoints")["items"] == []


@pytest.mark.clause("S113")
def test_files_of_one_step_are_one_checkpoint_and_a_renamed_directory_is_not_persisted_yet(
    mount: AcpfsMount,
) -> None:
    for name in ("model_7.pt", "optimizer_7.pt"):
        (mount.path / name).write_bytes(b"x" * 100)
    (mount.path / "9.orbax-checkpoint-tmp-1").mkdir()
    (mount.path / "9.orbax-checkpoint-tmp-1/d").write_bytes(b"x" * SIZE)
    (mount.path / "9.orbax-checkpoint-tmp-1").rename(mount.path / "9")
    assert the(mount, "*_7.pt")["files"] == 2
    assert the(mount, "9")["persisted_files"] == 0
    mount.ask("set", key="bandwidth", value="0")
    mount.flush()
    report = the(mount, "9")
    assert report["state"] == "persisted"
    assert report["began_at"] < report["closed_at"]
    assert (mount.backing / "9/d").stat().st_size == SIZE
