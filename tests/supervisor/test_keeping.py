"""What stays in RAM, against real mounts: retention, pins and evictions, over the end of a worker
and of a mount.
"""

from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path

import pytest

from acpfs.errors import AcpfsError, ExitCode
from tests.rig.mounts import AcpfsMount, CommandError, MakeMount

pytestmark = [
    pytest.mark.mount,
    pytest.mark.transports("native"),
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]
BOTH = pytest.mark.transports("libfuse", "native")
MIB = 1 << 20


@pytest.fixture
def mount(transport: str, tmp_path: Path, make_mount: MakeMount) -> AcpfsMount:
    (tmp_path / "backing").mkdir()
    return make_mount(tmp_path / "backing", transport, ram="64M")


def save(mount: AcpfsMount, name: str, size: int = 8 * MIB) -> bytes:
    content = os.urandom(size)
    path = mount.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    mount.flush()
    return content


def in_ram(mount: AcpfsMount) -> set[str]:
    return {row["path"] for row in mount.ask("ls")["items"] if row["tier"] != "backing"}


@pytest.mark.clause("S110")
def test_saves_in_a_loop_keep_the_newest_in_ram(mount: AcpfsMount) -> None:
    mount.ask("set", key="keep_checkpoints", value="3")
    contents = {step: save(mount, f"run/checkpoint-{step}/model.bin") for step in range(1, 8)}
    for name in "abc":
        save(mount, f"other/{name}")
    ours = {name for name in in_ram(mount) if name.startswith("run/")}
    assert {f"run/checkpoint-{step}/model.bin" for step in (5, 6, 7)} <= ours
    assert mount.status()["ram"]["retained_bytes"] == 24 * MIB
    assert all(
        (mount.path / f"run/checkpoint-{step}/model.bin").read_bytes() == content
        for step, content in contents.items()
    )


@pytest.mark.clause("S111")
def test_pins_outlive_the_worker_and_the_mount(mount: AcpfsMount) -> None:
    pinned = save(mount, "keep/a")
    assert mount.ctl("pin", str(mount.path / "keep"))["pinned_bytes"] == 8 * MIB
    os.kill(mount.status()["worker"]["pid"], signal.SIGKILL)
    mount.wait_status(lambda status: status["worker"]["number"] > 1)
    assert mount.status()["pins"] == ["keep"]
    for number in range(10):
        save(mount, f"other/{number}")
    assert "keep/a" in in_ram(mount)
    (stayed,) = [
        item for item in mount.ctl("evict", str(mount.path))["items"] if item["path"] == "keep/a"
    ]
    assert stayed == {"path": "keep/a", "reason": "pinned", "size": 8 * MIB}
    assert mount.ctl("unpin", str(mount.path / "keep"))["pins"] == 1
    assert mount.ctl("evict", str(mount.path / "keep"))["bytes"] == 8 * MIB
    assert (mount.path / "keep/a").read_bytes() == pinned


@pytest.mark.clause("S111")
def test_a_pin_that_would_fill_ram_is_refused(mount: AcpfsMount) -> None:
    save(mount, "large", 50 * MIB)
    with pytest.raises(CommandError) as caught:
        mount.ctl("pin", str(mount.path / "large"))
    assert caught.value.code == ExitCode.REFUSED
    assert mount.status()["pins"] == []


@pytest.mark.clause("S112")
def test_evict_leaves_what_is_open_mapped_or_not_persisted(mount: AcpfsMount) -> None:
    contents = {name: save(mount, name, MIB) for name in ("clean", "open", "checkpoint-1")}
    with open(mount.path / "open", "rb") as reader, open(mount.path / "written", "wb") as writer:
        writer.write(b"x" * MIB)
        writer.flush()
        done = mount.ask("evict", paths=[""])
        assert {item["path"]: item["reason"] for item in done["items"]} == {
            "open": "open or mapped",
            "written": "being written",
        }
        assert (done["files"], done["bytes"]) == (2, 2 * MIB)
        assert reader.read() == contents["open"]
    assert all((mount.path / name).read_bytes() == content for name, content in contents.items())
    with pytest.raises(AcpfsError, match="at least one path"):
        mount.ask("evict")


@pytest.mark.clause("S116")
@BOTH
def test_part_of_a_large_file_leaves_and_the_rest_is_read_from_ram(
    transport: str, tmp_path: Path, make_mount: MakeMount
) -> None:
    (tmp_path / "backing").mkdir()
    mount = make_mount(tmp_path / "backing", transport, ram="192M")
    large = save(mount, "checkpoint-1/large", 128 * MIB)
    save(mount, "small", 16 * MIB)
    small = save(mount, "checkpoint-2/next", 96 * MIB)
    (report,) = (r for r in mount.ask("checkpoints")["items"] if r["step"] == 1)
    assert report["loads_from"] == "mixed"
    assert 64 * MIB <= report["ram_bytes"] <= 96 * MIB
    if transport == "native":
        os.kill(mount.status()["worker"]["pid"], signal.SIGKILL)
        mount.wait_status(lambda status: status["worker"]["number"] > 1)
    assert (mount.path / "checkpoint-1/large").read_bytes() == large
    assert (mount.path / "checkpoint-2/next").read_bytes() == small
    with (
        open(mount.path / "checkpoint-1/large", "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        assert mapped[60 * MIB : 120 * MIB] == large[60 * MIB : 120 * MIB]
    mount.ask("evict", paths=["checkpoint-1"])
    assert (mount.path / "checkpoint-1/large").read_bytes() == large
