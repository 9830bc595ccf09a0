"""Urgent files on real mounts: the reserve when RAM is full and the storage stands still, who may
declare, what outlives a worker.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from acpfs import client
from acpfs.control.runtime import ENVIRONMENT_VARIABLE
from acpfs.errors import AcpfsError, ExitCode, NotMountedError, RefusedError
from tests.rig.files import checksum, write_blocks
from tests.rig.mounts import AcpfsMount, MakeMount
from tests.rig.processes import Child

clause = pytest.mark.clause
pytestmark = [
    pytest.mark.mount,
    pytest.mark.transports("native"),
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]
BOTH = pytest.mark.transports("libfuse", "native")
MIB = 1 << 20
RESERVE = 8 * MIB
BLOCK = os.urandom(MIB)


@pytest.fixture
def mount(
    transport: str, tmp_path: Path, make_mount: MakeMount, monkeypatch: pytest.MonkeyPatch
) -> AcpfsMount:
    """Nothing is drained before somebody says so."""
    (tmp_path / "backing").mkdir()
    made = make_mount(tmp_path / "backing", transport, ram=32 * MIB, reserve="25%", bandwidth=1)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(made.runtime_dir))
    return made


def write(path: Path, mib: int) -> str:
    return write_blocks(path, BLOCK, mib)


def waiting(mount: AcpfsMount, *paths: str) -> dict[str, Any]:
    return mount.wait_status(
        lambda status: {one["path"] for one in status["waiting"]} == set(paths)
    )


def full(mount: AcpfsMount) -> Child:
    """All but the reserve is used, and an ordinary writer waits."""
    write(mount.path / "before", 23)
    (mount.path / "gasp").mkdir()
    child = Child(lambda: write(mount.path / "ordinary", 2))
    waiting(mount, "ordinary")
    return child


@clause("S279", "S280", "S22")
@BOTH
def test_an_urgent_file_of_the_reserve_s_size_completes_while_the_storage_stands_still(
    mount: AcpfsMount,
) -> None:
    ordinary = full(mount)
    client.declare_urgent(mount.path / "gasp")
    (told,) = mount.status()["urgent"]
    assert (told["path"], told["uid"], 0 < told["left_s"] <= 3600) == ("gasp", 0, True)
    expected = write(mount.path / "gasp" / "state", 7)
    status = waiting(mount, "ordinary")
    assert (status["ram"]["urgent_bytes"], status["queue_bytes"]) == (RESERVE, 30 * MIB)
    assert "which is for urgent files" in status["waiting"][0]["reason"]
    larger = Child(lambda: write(mount.path / "gasp" / "larger", 12))
    waiting(mount, "ordinary", "gasp/larger")
    mount.ask("set", key="bandwidth", value="0")
    digests = ordinary.result(), larger.result()
    client.wait_persisted(mount.path / "gasp", timeout_s=60)
    mount.flush()
    found = [checksum(mount.backing / name) for name in ("gasp/state", "ordinary", "gasp/larger")]
    assert found == [expected, *digests]


@clause("S280", "S81")
@pytest.mark.transports("native")
@pytest.mark.parametrize("end", ["kill", "reload"])
def test_the_next_worker_keeps_the_reserve_for_who_was_urgent(mount: AcpfsMount, end: str) -> None:
    ordinary = full(mount)
    mount.ctl("urgent", str(mount.path / "gasp"), "--for", "50m")
    write(mount.path / "gasp" / "one", 3)
    if end == "kill":
        mount.kill_worker()
    else:
        mount.ctl("reload")
    status = mount.wait_status(lambda status: status["worker"]["number"] == 2 and status["waiting"])
    assert ([one["path"] for one in status["urgent"]], status["ram"]["urgent_bytes"]) == (
        ["gasp"],
        RESERVE,
    )
    write(mount.path / "gasp" / "two", 4)
    assert [one["path"] for one in waiting(mount, "ordinary")["waiting"]] == ["ordinary"]
    mount.ask("set", key="bandwidth", value="0")
    ordinary.result()


@clause("S280")
def test_a_declaration_ends_by_its_time_and_by_hand(mount: AcpfsMount) -> None:
    ordinary = full(mount)
    mount.ask("urgent", paths=["gasp"], for_s=0.01)
    mount.wait_status(lambda status: not status["urgent"])
    late = Child(lambda: write(mount.path / "gasp" / "late", 2))
    waiting(mount, "ordinary", "gasp/late")
    client.declare_urgent(mount.path / "gasp", seconds=60)
    late.result()
    assert client.withdraw_urgent(mount.path / "gasp")
    assert not client.withdraw_urgent(mount.path / "gasp")
    done = mount.run("acpfs-ctl", str(mount.path), "urgent", "gasp", "--off", check=False)
    assert (done.returncode, done.stdout) == (ExitCode.FAILED, "it was not urgent\n")
    late = Child(lambda: write(mount.path / "gasp" / "later", 2))
    waiting(mount, "ordinary", "gasp/later")
    mount.ask("set", key="reserve", value="0")
    late.result()
    ordinary.result()
    mount.ask("set", key="bandwidth", value="0")


@clause("S287")
def test_a_file_is_urgent_by_itself_and_what_lies_beside_it_is_not(mount: AcpfsMount) -> None:
    (mount.path / "latest").write_bytes(b"old")
    ordinary = full(mount)
    client.declare_urgent(mount.path / "latest", seconds=60)
    with open(mount.path / "latest", "r+b") as file:
        file.write(b"new")
    waiting(mount, "ordinary")
    assert (mount.path / "latest").read_bytes() == b"new"
    assert client.withdraw_urgent(mount.path / "latest")
    mount.ask("set", key="bandwidth", value="0")
    ordinary.result()


@clause("S280")
def test_what_cannot_be_urgent_is_refused_in_one_line(mount: AcpfsMount, tmp_path: Path) -> None:
    (mount.path / "gasp").mkdir()
    (mount.path / "link").symlink_to("gasp")
    refused = {
        "gasp --for 2h": (ExitCode.REFUSED, "at most 3600 seconds"),
        "gasp --for 0": (ExitCode.USAGE, "for no time at all"),
        "link": (ExitCode.REFUSED, "is neither a directory nor a file"),
        "link/below": (ExitCode.FAILED, "No such file or directory"),
        "gone": (ExitCode.FAILED, "No such file or directory"),
        str(tmp_path): (ExitCode.NOT_MOUNTED, "lies in no acpfs mount"),
    }
    for words, (code, said) in refused.items():
        done = mount.run("acpfs-ctl", str(mount.path), "urgent", *words.split(), check=False)
        assert (done.returncode, said in done.stderr, done.stderr.count("\n")) == (code, True, 1), (
            done.stderr
        )
    with pytest.raises(NotMountedError):
        client.declare_urgent(tmp_path)
    with pytest.raises(RefusedError):
        client.declare_urgent(mount.path / "link")
    assert mount.status()["urgent"] == []


@clause("S280")
def test_only_its_owner_and_root_declare_a_directory(
    transport: str, tmp_path: Path, make_mount: MakeMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "backing").mkdir()
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if parent != Path("/tmp"):
            parent.chmod(0o755)
    mount = make_mount(tmp_path / "backing", transport, reserve="25%", control_group="daemon")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(mount.runtime_dir))
    for name, uid in (("mine", 54321), ("roots", 0)):
        (mount.path / name).mkdir()
        os.chown(mount.path / name, uid, uid)

    def declares() -> list[str]:
        said = []
        for name in ("mine", "roots", ""):
            try:
                client.declare_urgent(mount.path / name, seconds=60)
            except AcpfsError as error:
                said.append(str(error))
        return said

    answers = Child(declares, uid=54321, gid=1).result()
    assert [answer.partition(":")[0] for answer in answers] == ["permission denied"] * 2
    assert [(one["path"], one["uid"]) for one in mount.status()["urgent"]] == [("mine", 54321)]
