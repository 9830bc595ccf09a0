"""`ram_per_user` on real mounts, with two real users: who fills his share waits, nobody else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.rig.idmapped import FIRST, idmapped
from tests.rig.mounts import AcpfsMount, MakeMount

ANN = 4001
BOB = 4002
MIB = 1 << 20
FILE_BYTES = 8 * MIB
SHARE_BYTES = 32 * MIB
WAIT_S = 240
WRITER = """
number=0
while [ $number -lt $2 ]; do
    yes $number | dd of=$1/$number.pt bs=1M count=$3 iflag=fullblock status=none || exit 1
    number=$((number + 1))
done
"""
"""Of the system's own: other users may not be let into the place of this interpreter."""
HALTING_WRITER = """
{
    yes 0 | dd bs=1M count=$3 iflag=fullblock status=none &&
        read go_on < $2 &&
        yes 0 | dd bs=1M count=$4 iflag=fullblock status=none
} > $1/0.pt
"""
"""Of one file, which it has open until it has been told to go on."""

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(os.getuid() != 0, reason="needs root, who makes users"),
]


def save(directory: Path, uid: int, count: int, size: int = FILE_BYTES) -> subprocess.Popen[bytes]:
    """A process of that user that saves so many files."""
    words = ["sh", "-c", WRITER, "sh", str(directory), str(count), str(size // MIB)]
    return subprocess.Popen(words, user=uid, group=uid)


def owners(status: dict[str, Any]) -> dict[int, int]:
    """User → dirty bytes."""
    return {one["uid"]: one["taken_bytes"] for one in status["ram"]["owners"]}


def waits_for_share(status: dict[str, Any], uid: int) -> bool:
    return any(one["reason"].startswith(f"user {uid} has ") for one in status["waiting"])


def gauges(mount: AcpfsMount) -> dict[str, float]:
    """What its metrics say of shares."""
    said = mount.run("acpfs-ctl", str(mount.path), "metrics").stdout
    names = ("ram_share_bytes", "owners_waiting", "largest_owner_bytes", "largest_owner_uid")
    pairs = (line.split() for line in said.splitlines() if not line.startswith("#"))
    return {
        name: float(value)
        for key, value in pairs
        for name in names
        if key.partition("{")[0] == f"acpfs_{name}"
    }


def content(directory: Path, count: int, size: int = FILE_BYTES) -> bool:
    return all(
        (directory / f"{number}.pt").read_bytes() == f"{number}\n".encode() * (size // 2)
        for number in range(count)
    )


@pytest.mark.clause("S571", "S572", "S573")
@pytest.mark.every_lane
def test_one_user_fills_his_share_and_another_saves(
    tmp_path: Path, make_mount: MakeMount, transport: str
) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    # so little that nothing is persisted before it is set to all
    mount = make_mount(backing, transport, ram="256M", ram_per_user="32M", bandwidth="1")
    tmp_path.chmod(0o755)
    for name, uid in (("ann", ANN), ("bob", BOB)):
        (mount.path / name).mkdir()
        os.chown(mount.path / name, uid, uid)
    with save(mount.path / "ann", ANN, 8) as ann:
        try:
            mount.wait_status(lambda status: waits_for_share(status, ANN))
            with save(mount.path / "bob", BOB, 2) as bob:
                assert bob.wait(WAIT_S) == 0
            before = mount.status()
            assert ann.poll() is None
            assert before["ram"]["share_bytes"] == SHARE_BYTES
            assert owners(before)[BOB] == 2 * FILE_BYTES
            assert 0 < owners(before)[ANN] <= SHARE_BYTES
            shown = mount.run("acpfs-ctl", str(mount.path), "status").stdout
            assert f"user {ANN}" in shown
            assert "1 waiting" in shown
            assert gauges(mount) == {
                "ram_share_bytes": SHARE_BYTES,
                "owners_waiting": 1,
                "largest_owner_bytes": owners(before)[ANN],
                "largest_owner_uid": ANN,
            }

            if transport != "libfuse":  # whose mount ends with its worker
                mount.kill_worker()
            mount.wait_status(lambda status: waits_for_share(status, ANN))
            after = mount.status()
            assert (after["worker"]["pid"] == before["worker"]["pid"]) is (transport == "libfuse")
            assert owners(after)[BOB] == owners(before)[BOB]
            assert 0 < owners(after)[ANN] <= SHARE_BYTES
            (mount.path / "bob" / "more").write_bytes(b"m" * 4 * MIB)
            os.chown(mount.path / "bob" / "more", BOB, BOB)
            assert owners(mount.status())[BOB] == 2 * FILE_BYTES + 4 * MIB
            assert ann.poll() is None

            mount.ctl("set", "bandwidth=0")
            assert ann.wait(WAIT_S) == 0
        finally:
            ann.kill()
    mount.flush()
    assert owners(mount.status()) == {}
    assert gauges(mount) == {
        "ram_share_bytes": SHARE_BYTES,
        "owners_waiting": 0,
        "largest_owner_bytes": 0,
        "largest_owner_uid": -1,
    }
    assert content(backing / "ann", 8)
    assert content(backing / "bob", 2)
    assert (backing / "ann" / "0.pt").stat().st_uid == ANN


@pytest.mark.clause("S538", "S571", "S572")
@pytest.mark.transports("native-passthrough", "native-direct")
def test_users_of_a_pod_have_the_shares_of_whom_the_storage_names(
    tmp_path: Path, make_mount: MakeMount, transport: str
) -> None:
    """The host knows them by other numbers, and has users with the numbers that the pod uses."""
    backing = tmp_path / "backing"
    backing.mkdir()
    shares = {"ram": "256M", "ram_per_user": "32M", "bandwidth": "1"}
    mount = make_mount(backing, transport, idmap=True, **shares)
    tmp_path.chmod(0o755)
    for name, uid in (("ann", ANN), ("bob", BOB)):
        (mount.path / name).mkdir()
        os.chown(mount.path / name, uid, uid)
    with (
        idmapped(mount.path, tmp_path / "pod") as pod,
        save(pod / "ann", FIRST + ANN, 8) as ann,
    ):
        try:
            mount.wait_status(lambda status: waits_for_share(status, ANN))
            with save(pod / "bob", FIRST + BOB, 2) as bob:
                assert bob.wait(WAIT_S) == 0
            before = mount.status()
            assert set(owners(before)) == {ANN, BOB}
            assert owners(before)[BOB] == 2 * FILE_BYTES
            assert 0 < owners(before)[ANN] <= SHARE_BYTES
            mount.kill_worker()
            mount.wait_status(lambda status: waits_for_share(status, ANN))
            # the same user, by the host's own number and by the pod's: one share
            with save(mount.path / "bob", BOB, 1) as bob:
                assert bob.wait(WAIT_S) == 0
            assert ann.poll() is None
            assert set(owners(mount.status())) == {ANN, BOB}
            mount.ctl("set", "bandwidth=0")
            assert ann.wait(WAIT_S) == 0
        finally:
            ann.kill()
    mount.flush()
    assert content(backing / "ann", 8)
    assert content(backing / "bob", 2)
    assert (backing / "ann" / "0.pt").stat().st_uid == ANN


@pytest.mark.clause("S573")
@pytest.mark.transports("native-passthrough")
def test_a_file_larger_than_the_share_outgrows_ram_and_is_whole(
    tmp_path: Path, make_mount: MakeMount, transport: str
) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    # so slow that the file is being written for as long as nobody has seen it
    mount = make_mount(backing, transport, ram="512M", ram_per_user="32M", bandwidth="1")
    tmp_path.chmod(0o755)
    for name, uid in (("ann", ANN), ("bob", BOB)):
        (mount.path / name).mkdir()
        os.chown(mount.path / name, uid, uid)
    size = 5 * SHARE_BYTES
    os.mkfifo(halt := tmp_path / "halt")
    halt.chmod(0o644)
    words = [str(mount.path / "ann"), str(halt), "16", str(size // MIB - 16)]
    with subprocess.Popen(["sh", "-c", HALTING_WRITER, "sh", *words], user=ANN, group=ANN) as ann:
        mount.wait_status(lambda status: owners(status).get(ANN, 0) > SHARE_BYTES // 4)
        mount.kill_worker()
        assert ann.poll() is None
        mount.ctl("set", "bandwidth=0")
        halt.write_text("go on\n")
        with save(mount.path / "bob", BOB, 2) as bob:
            assert bob.wait(WAIT_S) == 0
        assert ann.wait(WAIT_S) == 0
    mount.flush()
    assert mount.status()["lane_choices"]["passthrough"] >= 1
    assert content(backing / "ann", 1, size)
    assert content(backing / "bob", 2)


@pytest.mark.clause("S574")
@pytest.mark.transports("native", "libfuse")
def test_df_of_a_user_shows_what_he_can_still_write(
    tmp_path: Path, make_mount: MakeMount, transport: str
) -> None:
    (tmp_path / "backing").mkdir()
    mount = make_mount(
        tmp_path / "backing",
        transport,
        ram="256M",
        ram_per_user="32M",
        bandwidth="1",
        when_full="error",
    )
    tmp_path.chmod(0o755)
    (mount.path / "ann").mkdir()
    os.chown(mount.path / "ann", ANN, ANN)

    def available(uid: int) -> int:
        words = ["df", "-B1", "--output=avail", str(mount.path)]
        done = subprocess.run(words, user=uid, capture_output=True, check=True, timeout=WAIT_S)
        return int(done.stdout.split()[-1])

    try:
        assert available(ANN) == SHARE_BYTES
        with save(mount.path / "ann", ANN, 2) as ann:
            assert ann.wait(WAIT_S) == 0
        assert available(ANN) == SHARE_BYTES - 2 * FILE_BYTES
        assert available(BOB) == SHARE_BYTES
        with save(mount.path / "ann", ANN, 3, SHARE_BYTES - FILE_BYTES) as ann:
            assert ann.wait(WAIT_S) != 0
        mount.ctl("set", "when_full=wait")
        assert available(ANN) > SHARE_BYTES
    finally:
        mount.ctl("set", "bandwidth=0")
    mount.ctl("discard", str(mount.path / "ann" / "0.pt"))
