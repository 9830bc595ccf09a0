"""A node that is lost for good, and what its holder had of it: real mounts, all processes of one
killed and its RAM wiped.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from acpfs.backing.member_records import NodeRecord, NodeState
from acpfs.errors import AcpfsError, ExitCode
from tests.exchange.test_copies import lose, member, mounted, save, wait_copied
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount, CommandError, wait_gone
from tests.rig.processes import stop_processes
from tests.rig.storage.servers import until

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount, pytest.mark.transports("native")]
MIB = 1 << 20
SLOW: dict[str, Any] = {"bandwidth": 1000}
"""Nothing of a megabyte comes to the storage, and no call hangs there."""
NOTICES: dict[str, Any] = {"node_timeout": 2.0}


def adopt(mount: AcpfsMount, node: str, *words: str) -> str:
    return mount.run("acpfs-ctl", str(mount.path), "adopt", node, "--is-off", *words).stdout


def missed(mount: AcpfsMount, node: str) -> None:
    mount.wait_status(lambda status: node in status["cluster"]["missing"])


def on_storage(fault_fs: FaultFs) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in fault_fs.path.iterdir() if one.is_file()}


def record_of(fault_fs: FaultFs, node: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((fault_fs.path / ".acpfs" / "nodes" / node).read_bytes())
    return found


@clause("S587", "S588")
def test_what_was_copied_is_drained_by_the_holder(tmp_path: Path, fault_fs: FaultFs) -> None:
    """In its order, with what was removed and renamed; and a pointer that was closed elsewhere
    after it is not withheld.
    """
    saves = member(fault_fs, tmp_path, "saves", **SLOW)
    holds = member(fault_fs, tmp_path, "holds", **NOTICES)
    with mounted(saves, holds):
        files = {f"f{number}": os.urandom(MIB + number) for number in range(3)}
        save(saves, files)
        (saves.path / "f1").rename(saves.path / "renamed")
        (saves.path / "f0").unlink()
        (saves.path / "run").mkdir()
        (saves.path / "run" / "latest").write_bytes(b"renamed")
        wait_copied(saves, len(files) + 1)
        (holds.path / "latest").write_bytes(b"f2")
        closed_at = time.time()
        holds.wait_status(lambda now: now["held"] and now["held"][0]["until"] > closed_at + 1)
        assert on_storage(fault_fs) == {}
        lose(saves)
        missed(holds, "saves")
        assert "adopted: saves" in adopt(holds, "saves")
        found = on_storage(fault_fs)
        assert found.pop("latest", b"f2") == b"f2"
        assert found == {"renamed": files["f1"], "f2": files["f2"]}
        assert (fault_fs.path / "run" / "latest").read_bytes() == b"renamed"
        record = record_of(fault_fs, "saves")
        assert record["state"] == "left"
        assert record["lost"][0] > closed_at
        holds.flush()
        assert on_storage(fault_fs)["latest"] == b"f2"
        assert holds.status()["held"] == []
        holds.wait_status(lambda now: now["ram"]["held_bytes"] == 0)  # deleted behind that
        assert not (holds.runtime_dir / "adopting" / "saves").exists()
        with pytest.raises(CommandError) as caught:
            adopt(holds, "saves")
        assert caught.value.code == ExitCode.REFUSED
        with pytest.raises(CommandError) as caught:
            saves.start()
        assert "has taken over the log of node saves" in caught.value.stderr


@clause("S587")
def test_the_copy_ends_at_the_first_file_that_it_lacks(tmp_path: Path, fault_fs: FaultFs) -> None:
    saves = member(fault_fs, tmp_path, "saves", **SLOW)
    holds = member(fault_fs, tmp_path, "holds", copies_ram="3M", **NOTICES)
    with mounted(saves, holds):
        save(saves, {"one": b"1" * MIB})
        wait_copied(saves, 1)
        save(saves, {"large": b"2" * (4 * MIB), "two": b"3" * MIB})
        status = saves.wait_status(lambda now: now["copies"]["behind_files"] == 2)
        assert (
            "would be lost with this node"
            in saves.run("acpfs-ctl", str(saves.path), "status").stdout
        )
        assert status["copies"]["behind_bytes"] == 5 * MIB
        lose(saves)
        missed(holds, "saves")
        adopt(holds, "saves")
        assert on_storage(fault_fs) == {"one": b"1" * MIB}


@clause("S587", "S615")
def test_nobody_is_adopted_who_lives_or_of_whom_nothing_counts(
    tmp_path: Path, fault_fs: FaultFs
) -> None:
    members = [member(fault_fs, tmp_path, name) for name in ("saves", "holds")]
    with mounted(*members) as (saves, holds):
        save(saves, {"one": b"1" * MIB})
        with pytest.raises(CommandError) as caught:
            adopt(holds, "saves")
        assert caught.value.code == ExitCode.REFUSED
        assert "saves is alive" in caught.value.stderr
        with pytest.raises(CommandError) as caught:
            adopt(holds, "nobody")
        assert caught.value.code == ExitCode.REFUSED
        # nor does what is held go while a pointer is withheld that only the copy has
        record = NodeRecord("lost", state=NodeState.LEFT, withheld=1)
        (fault_fs.path / ".acpfs" / "nodes" / "lost").write_bytes(record.to_bytes())
        with pytest.raises(AcpfsError, match="1 pointers of lost are withheld"):
            holds.ask("adopted", node="lost")
        saves.flush()
        wait_copied(saves, 0)  # and it goes on being copied


@clause("S587")
@pytest.mark.parametrize("holder", ["stays", "is unmounted"])
def test_an_adoption_that_ended_in_the_middle_is_gone_on_with(
    tmp_path: Path, fault_fs: FaultFs, holder: str
) -> None:
    """All processes of the adopter die, and the command is given again. The holder may have been
    unmounted meanwhile: its RAM has the only copy, though the lost node's record is fresh.
    """
    saves = member(fault_fs, tmp_path, "saves", **SLOW)
    holds = member(fault_fs, tmp_path, "holds", **NOTICES)
    files = {f"f{number}": os.urandom(MIB + number) for number in range(3)}
    with mounted(saves, holds):
        save(saves, files)
        wait_copied(saves, 3)
        lose(saves)
        missed(holds, "saves")
        holds.umount()  # what it holds of a lost node outlives its mount
        holds.start()
        missed(holds, "saves")
        found = holds.ask("adopt", node="saves")
        adopting = AcpfsMount(
            fault_fs.path,
            holds.runtime_dir / "adopting" / "saves",
            "native",
            runtime_dir=holds.runtime_dir,
            node_id="saves",
            adopts="holds",
            spill=found["spill"],
            spill_mode="mirror",
            **SLOW,
        )
        adopting.path.mkdir(parents=True)
        adopting.start()
        adopting.wait_status(lambda now: now["queue_length"] == 3)
        if holder == "is unmounted":
            holds.wait_status(lambda now: "saves" not in now["cluster"]["missing"])
            holds.umount()
            holds.start()
        supervisor = adopting.supervisor
        worker = adopting.pid
        # Stopped first, and the supervisor is killed last: a worker that notices its end starts
        # another one, and so did one that was stopped, and then went on.
        stop_processes([supervisor, worker])
        for process in (worker, supervisor):
            os.kill(process, signal.SIGKILL)
        for process in (worker, supervisor):
            wait_gone(process)
        assert holds.status()["held"][0]["claimed"]
        adopt(holds, "saves")
        assert on_storage(fault_fs) == files


@clause("S616")
def test_what_a_third_nodes_loss_withholds_is_named_and_drained_afterwards(
    tmp_path: Path, fault_fs: FaultFs
) -> None:
    """A pointer that the lost node had closed waits for what another lost node may have had.

    Which files are pointers is a setting, and whoever adopts goes by it, too.
    """
    third = member(fault_fs, tmp_path, "third", copies=0, exchange="off", **SLOW)
    saves = member(fault_fs, tmp_path, "saves", pointer_patterns="points", **SLOW)
    holds = member(fault_fs, tmp_path, "holds", pointer_patterns="points", **NOTICES)
    with third, mounted(saves, holds):
        save(third, {"shard": b"3" * MIB})
        saves.wait_status(lambda now: now["cluster"]["nodes"] == 2)
        save(saves, {"model": b"1" * MIB, "points": b"model"})
        wait_copied(saves, 2)
        lose(third)
        lose(saves)
        missed(holds, "saves")
        missed(holds, "third")
        for _time in range(2):
            with pytest.raises(CommandError) as caught:
                adopt(holds, "saves")
            assert caught.value.code == ExitCode.FAILED
            assert "but for points, withheld since node third is MISSING" in caught.value.stderr
            assert "`acpfs-ctl nodes forget third`" in caught.value.stderr
            assert on_storage(fault_fs) == {"model": b"1" * MIB}
            assert holds.status()["held"][0]["claimed"]
        holds.run("acpfs-ctl", str(holds.path), "nodes", "forget", "third")
        assert "adopted: saves" in adopt(holds, "saves")
        assert on_storage(fault_fs) == {"model": b"1" * MIB, "points": b"model"}
        assert holds.status()["held"] == []


@clause("S622", "S623")
@pytest.mark.parametrize("named", ["other", "old"])
def test_a_removal_that_waits_for_what_its_own_nodes_loss_withholds_ends_no_adoption(
    tmp_path: Path, fault_fs: FaultFs, named: str
) -> None:
    """The holder's pointer was closed in the moments of which nobody knows what the lost node had,
    and before that one removed something. Only what the pointer on the storage names is kept,
    until a person says that the loss is forgotten.
    """
    saves = member(fault_fs, tmp_path, "saves", clock_bound=5.0)
    holds = member(fault_fs, tmp_path, "holds", clock_bound=5.0, **NOTICES)
    with mounted(saves, holds):
        save(saves, {"old": b"o", "other": b"x"})
        saves.flush()
        save(holds, {"latest": named.encode()})
        holds.flush()
        saves.ask("set", key="bandwidth", value="1000")
        save(saves, {"model": b"1" * MIB})
        save(holds, {"latest": b"model"})
        closed = time.time()
        # surely later, by what both have heard of the other's clock
        until(lambda: time.time() > closed + 2.0, "the removal comes later")
        (saves.path / "old").unlink()
        wait_copied(saves, 1)
        lose(saves)
        missed(holds, "saves")
        if named == "old":
            with pytest.raises(CommandError) as caught:
                adopt(holds, "saves")
            assert caught.value.code == ExitCode.FAILED
            assert "`acpfs-ctl nodes forget saves` here" in caught.value.stderr
            assert on_storage(fault_fs)["old"] == b"o"
            forget = ("nodes", "forget", "saves")
            assert "forgotten" in holds.run("acpfs-ctl", str(holds.path), *forget).stdout
        assert "adopted: saves" in adopt(holds, "saves", "--timeout", "60")
        found = on_storage(fault_fs)
        assert (found["model"], found["other"], "old" in found) == (b"1" * MIB, b"x", False)
        assert record_of(fault_fs, "saves")["state"] == NodeState.LEFT.value
        if named == "other":
            assert found["latest"] == b"other", "it may name what was lost"
            holds.run("acpfs-ctl", str(holds.path), "nodes", "forget", "saves")
        holds.flush()
        assert on_storage(fault_fs)["latest"] == b"model"
