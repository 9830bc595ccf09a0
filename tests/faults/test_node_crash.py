"""The node goes: all processes killed, the RAM tier wiped.

What the backing directory then shows, and what the next mount clears away.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.leftovers import MIRRORS, WITHDRAWN, MachineId, clear
from acpfs.backing.lower import LowerPath
from acpfs.backing.member_records import NodeRecord, NodeRecords, NodeState
from acpfs.errors import ExitCode
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount, CommandError, MakeMount, mounts_below, staging_files
from tests.rig.runtime import REAL

clause = pytest.mark.clause
QUICK = {"retry_delay_min": 0.05, "retry_delay_max": 0.3, "attr_timeout": 0.1, "heartbeat": 0.25}


def crash_node(mount: AcpfsMount) -> None:
    """Kill all, and wipe what a reboot wipes: the RAM tier and the rest of the runtime directory,
    with the random node ids in it.
    """
    mount.kill()
    for mounted in mounts_below(mount.runtime_dir):
        subprocess.run(["umount", "-l", str(mounted)], check=True, timeout=60)
    shutil.rmtree(mount.runtime_dir)


@pytest.mark.mount
@clause("S3", "S86")
def test_the_next_mount_of_a_node_id_clears_its_staging(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    mount = make_mount(fault_fs.path, transport, node_id="n1", **QUICK)
    (mount.path / "latest").write_bytes(b"1")
    (mount.path / "shard-1").write_bytes(b"one")
    mount.flush()
    stopped = fault_fs.rule(
        "freeze", ops=["fsync"], glob=".acpfs/staging/*"
    )  # not the node's record, which beats meanwhile
    fault_fs.rule("freeze", ops=["rename"])
    for number in range(4):
        (mount.path / f"shard-2-{number}").write_bytes(os.urandom(300_000))
    (mount.path / "latest").write_bytes(b"2")
    fault_fs.wait_hits(stopped)
    assert staging_files(fault_fs.source) != []
    crash_node_frozen(mount, fault_fs)
    assert staging_files(fault_fs.source) != []
    visible = {path.name: path.read_bytes() for path in fault_fs.source.iterdir() if path.is_file()}
    assert visible["latest"] == b"1"
    assert visible["shard-1"] == b"one"
    mount.start()
    (mount.path / "after").write_bytes(b"x")
    mount.flush()
    assert staging_files(fault_fs.source) == []
    assert {path.name: path.read_bytes() for path in mount.path.iterdir()} == {
        **visible,
        "after": b"x",
    }
    mount.umount()


def crash_node_frozen(mount: AcpfsMount, fault_fs: FaultFs) -> None:
    """Processes in a call that hangs die only when it ends; the frozen calls fail instead of being
    carried out.
    """
    fault_fs.rule("fail", ops=["rename", "fsync"], errno="EIO")
    for pid in mount.living():
        with contextlib.suppress(ProcessLookupError):  # it has ended with the one before
            os.kill(pid, 9)
    fault_fs.thaw()
    crash_node(mount)
    fault_fs.clear()


@pytest.mark.mount
@clause("S86")
def test_second_identities_live_side_by_side_and_keep_their_own(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    first = make_mount(backing, transport, "m1", node_id="n1", **QUICK)
    second = make_mount(backing, transport, "m2", node_id="n2", **QUICK)
    (first.path / "a").write_bytes(b"1")
    (second.path / "b").write_bytes(b"2")
    first.flush()
    second.flush()
    assert (first.path / "b").read_bytes() == b"2"
    assert (second.path / "a").read_bytes() == b"1"
    assert sorted(os.listdir(backing / ".acpfs" / "staging")) == ["n1", "n2"]
    second.umount()
    (first.path / "c").write_bytes(b"3")
    first.umount()
    assert (backing / "c").read_bytes() == b"3"


@pytest.mark.mount
@clause("S86", "S197")
def test_a_ram_tier_of_another_backing_directory_or_without_its_state_is_refused(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    """The same tier directory, whose record names another volume: somebody copied a runtime
    directory. Or removed files in it.
    """
    backing = tmp_path / "backing"
    backing.mkdir()
    mount = make_mount(backing, transport, node_id="n1", bandwidth=1)
    (mount.path / "kept").write_bytes(os.urandom(100_000))
    meta = Path(mount.status()["ram"]["directory"]) / "meta.json"
    mount.kill()
    ours = meta.read_text()
    meta.write_text(
        json.dumps({**json.loads(ours), "volume_id": "0" * 32, "backing": "/elsewhere"})
    )
    with pytest.raises(CommandError, match="belongs to /elsewhere") as refused:
        mount.start(bandwidth=0)
    assert refused.value.code == ExitCode.REFUSED
    meta.write_text(ours)
    wal = meta.with_name("state.sqlite-wal")
    wal.rename(wal.with_name("away"))
    with pytest.raises(
        CommandError,
        match=r"write-ahead log is gone; 1 files of 100000 bytes in .* were left alone",
    ) as refused:
        mount.start()
    assert refused.value.code == ExitCode.REFUSED
    wal.with_name("away").rename(wal)
    mount.start()
    mount.flush()
    assert (backing / "kept").stat().st_size == 100_000
    mount.umount()


# -- what node ids that are no more have left

HERE = MachineId("host1.example", "4c4c4544-0035", "boot-2")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[BackingDirectory]:
    opened = BackingDirectory(tmp_path, "host1-new", REAL)
    yield opened
    opened.disconnect()


def left_by(tmp_path: Path, node: str, machine: MachineId) -> Path:
    """A node's record and two staging files."""
    other = BackingDirectory(tmp_path, node, REAL)
    record = {
        "node": node,
        "host": machine.host,
        "hardware": machine.hardware,
        "boot_id": machine.boot_id,
    }
    other.write_own((b"nodes", node.encode()), json.dumps(record).encode())
    for name in ("1-abc", "overflow-def"):
        other.close(other.create_staging(name))
    other.disconnect()
    return tmp_path / ".acpfs" / "staging" / node


@clause("S86")
def test_what_an_earlier_boot_of_this_machine_left_is_removed(
    directory: BackingDirectory, tmp_path: Path
) -> None:
    left = left_by(tmp_path, "host1-old", replace(HERE, boot_id="boot-1"))
    assert clear(directory, HERE, REAL.clock) == []
    assert not left.exists()
    assert not (tmp_path / ".acpfs" / "nodes" / "host1-old").exists()


@clause("S86")
@pytest.mark.parametrize(
    ("node", "machine"),
    [
        ("host1-live", HERE),
        ("host1-odd", replace(HERE, boot_id="")),
        ("host1-namesake", replace(HERE, host="host1.elsewhere", boot_id="boot-1")),
        ("host2-old", replace(HERE, host="host2", boot_id="boot-1")),
        ("host1-new", replace(HERE, boot_id="boot-1")),
    ],
)
def test_what_may_be_anothers_only_copy_is_left_alone(
    directory: BackingDirectory, tmp_path: Path, node: str, machine: MachineId
) -> None:
    left = left_by(tmp_path, node, machine)
    assert clear(directory, HERE, REAL.clock) == []
    assert len(list(left.iterdir())) == 2


@clause("S86", "S152")
def test_staging_files_of_a_node_that_is_mirrored_are_left_alone(
    directory: BackingDirectory, tmp_path: Path
) -> None:
    """Found by reading: after a reboot, the first of two mounts removed what the mirror of the
    second counted on.
    """
    left = left_by(tmp_path, "host1-old", replace(HERE, boot_id="boot-1"))
    directory.write_own((MIRRORS, b"host1-old"), b'{"token": "1"}')
    (said,) = clear(directory, HERE, REAL.clock)
    assert "host1-old left a mirror" in said
    assert len(list(left.iterdir())) == 2
    directory.write_own((MIRRORS, b"host1-old"), WITHDRAWN)
    assert clear(directory, HERE, REAL.clock) == []
    assert not left.exists()


@clause("S86", "S164")
@pytest.mark.parametrize("step", ["write_own", "remove_own_directory"])
def test_other_nodes_learn_of_the_loss_although_the_clearing_is_cut_off(
    directory: BackingDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    left_by(tmp_path, "host1-old", replace(HERE, boot_id="boot-1"))
    records = NodeRecords(directory)
    records.publish(
        NodeRecord(
            "host1-old",
            beat=1,
            clock=100.0,
            watermark=90.0,
            host=HERE.host,
            hardware=HERE.hardware,
            boot_id="boot-1",
        )
    )

    def refuse(_names: LowerPath, _content: bytes = b"") -> None:
        raise OSError(errno.EIO, "cut off")

    with monkeypatch.context() as patch:
        patch.setattr(directory, step, refuse)
        for _ in range(2):
            with pytest.raises(OSError, match="cut off"):
                clear(directory, HERE, REAL.clock)
    clear(directory, HERE, REAL.clock)
    gone = records.read("host1-old")
    assert gone is not None
    assert gone.state is NodeState.GONE
    assert gone.lost is not None
    assert gone.lost[0] == 90.0


@clause("S86")
def test_half_of_an_exchange_is_named_and_left(directory: BackingDirectory, tmp_path: Path) -> None:
    left = left_by(tmp_path, "host1-old", replace(HERE, boot_id="boot-1"))
    (left / "exchange-0123456789abcdef").write_bytes(b"the only copy")
    (said,) = clear(directory, HERE, REAL.clock)
    assert "exchange-0123456789abcdef is one of the two, move it back" in said
    assert [p.name for p in left.iterdir()] == ["exchange-0123456789abcdef"]


@clause("S86")
@pytest.mark.parametrize("hardware", ["", "another"])
def test_without_proof_it_is_named_and_left(
    directory: BackingDirectory, tmp_path: Path, hardware: str
) -> None:
    left = left_by(tmp_path, "host1-old", replace(HERE, boot_id="boot-1", hardware=hardware))
    (said,) = clear(
        directory, replace(HERE, hardware="" if not hardware else HERE.hardware), REAL.clock
    )
    assert "node id host1-old left 2 staging files" in said
    assert len(list(left.iterdir())) == 2
