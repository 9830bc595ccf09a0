"""What is closed on a member, held by another one: real mounts over one storage, which is frozen
for the time of the copy.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from acpfs import client
from acpfs.client import Durability
from acpfs.control.runtime import ENVIRONMENT_VARIABLE
from acpfs.errors import DeadlineError, ExitCode
from acpfs.ram.tier import HELD
from acpfs.training import mounted as gasps
from tests.cluster.stand import QUICK
from tests.rig.faultfs import FaultFs
from tests.rig.flushed import stored, sync_directory
from tests.rig.mounts import AcpfsMount, CommandError, mounts_below
from tests.rig.processes import stop_processes
from tests.rig.storage.servers import until

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount, pytest.mark.transports("native")]
MIB = 1 << 20


def member(fault_fs: FaultFs, tmp_path: Path, name: str, **options: Any) -> AcpfsMount:
    settings: dict[str, Any] = {
        **QUICK,
        "ram": "128M",
        "exchange": "127.0.0.1",
        "node_id": name,
        "copies": 1,
        "failure_domain": f"rack-of-{name}",
        **options,
    }
    return AcpfsMount(fault_fs.path, tmp_path / name, "native", **settings)


@contextmanager
def mounted(*members: AcpfsMount) -> Iterator[tuple[AcpfsMount, ...]]:
    """All of them, once each has a holder."""
    with ExitStack() as stack:
        for one in members:
            stack.enter_context(one)
        for one in members:
            one.wait_status(lambda status: status["copies"]["state"] == "on")
        yield members


def frozen(fault_fs: FaultFs, node: str) -> None:
    """Nothing of a node comes to the storage."""
    fault_fs.freeze(["fsync"], glob=f".acpfs/staging/{node}/*")


def save(mount: AcpfsMount, names: dict[str, bytes]) -> None:
    for name, data in names.items():
        (mount.path / name).write_bytes(data)


def wait_copied(mount: AcpfsMount, files: int) -> dict[str, Any]:
    """Until so many files would survive the mount's loss.

    What was staged before its turn to be copied is not copied any more: it is on the storage.
    """

    def all_copied(status: dict[str, Any]) -> bool:
        copies = status["copies"]
        staged = sum(op["state"] == "staged" for op in status["queue"])
        return (
            copies["state"] == "on"
            and files - staged <= copies["files"] <= files
            and not (copies["behind_files"] or copies["pending"])
        )

    return mount.wait_status(all_copied)


def held(mount: AcpfsMount) -> dict[str, list[bytes]]:
    """What a member holds: origin → contents of the copies.

    What the origin needs no more goes a moment behind what the origin says of it (`wait_held`).
    """
    found: dict[str, list[bytes]] = {}
    for path in sorted((mount.runtime_dir).rglob(f"{HELD}/*/*/acpfs-*/*-*")):
        if not path.name.startswith("mirror-"):
            found.setdefault(path.parts[-4], []).append(path.read_bytes())
    return {origin: sorted(contents) for origin, contents in found.items()}


def wait_held(mount: AcpfsMount, expected: dict[str, list[bytes]]) -> None:
    """It holds just that, once what is needed no more has gone."""
    until(lambda: held(mount) == expected, f"{mount.path.name} holds just that")


def all_is_counted(status: dict[str, Any]) -> bool:
    """What has gone, such as an earlier journal, counts in RAM until it is deleted, behind it."""
    return bool(sum(one["bytes"] for one in status["held"]) == status["ram"]["held_bytes"])


def lose(mount: AcpfsMount) -> None:
    """The machine is gone: all processes, and its RAM."""
    mount.kill()
    for one in mounts_below(mount.runtime_dir):
        subprocess.run(["umount", "-l", str(one)], check=True, timeout=60)


@clause("S580", "S583", "S584")
def test_what_is_closed_is_held_by_another_until_it_is_persisted(
    tmp_path: Path, fault_fs: FaultFs
) -> None:
    files = {f"f{number}": os.urandom(3 * MIB + number) for number in range(3)} | {"none": b""}
    members = [member(fault_fs, tmp_path, name) for name in ("saves", "holds")]
    with mounted(*members) as (saves, holds):
        frozen(fault_fs, "saves")
        save(saves, files)
        status = wait_copied(saves, len(files))
        assert status["copies"]["holder"] == "holds"
        assert status["copies"]["bytes"] == sum(map(len, files.values()))
        assert held(holds) == {"saves": sorted(files.values())}
        told = holds.wait_status(all_is_counted)
        (one,) = told["held"]
        assert (one["node"], one["files"], one["claimed"]) == ("saves", len(files) + 2, False)
        assert told["ram"]["tmpfs_used_bytes"] <= told["ram"]["held_bytes"] + MIB
        line = "copies   1 of 1 at holds, on; nothing would be lost with this node"
        # a machine that does much else is behind for a moment
        until(lambda: line in saves.run("acpfs-ctl", str(saves.path), "status").stdout, line)
        assert "of saves, heard of" in holds.run("acpfs-ctl", str(holds.path), "status").stdout
        fault_fs.clear()
        saves.flush()
        wait_copied(saves, 0)
        holds.wait_status(lambda now: now["ram"]["held_bytes"] < MIB)
        wait_held(holds, {})


@clause("S581", "S582")
def test_a_holder_that_hangs_holds_nobody_up_and_one_that_is_lost_is_replaced(
    tmp_path: Path, fault_fs: FaultFs
) -> None:
    members = [member(fault_fs, tmp_path, name) for name in ("n1", "n2", "n3")]
    with mounted(*members) as (n1, n2, n3):
        holder = n1.status()["copies"]["holder"]  # whoever answered first
        first, second = (n2, n3) if holder == "n2" else (n3, n2)
        stop_processes(first.living())
        save(n1, {"one": os.urandom(MIB)})
        n1.flush()  # closed, and on the storage, though the holder says nothing
        frozen(fault_fs, "n1")
        save(n1, {"two": b"2" * MIB})
        status = wait_copied(n1, 1)
        assert status["copies"]["holder"] == second.path.name
        assert b"2" * MIB in held(second)["n1"]
        wait_held(second, {"n1": [b"2" * MIB]})  # "one" may have come, and goes again
        for process in first.living():
            os.kill(process, signal.SIGCONT)
        lose(second)
        n1.wait_status(lambda now: now["copies"]["holder"] == first.path.name)
        wait_copied(n1, 1)
        assert b"2" * MIB in held(first)["n1"]  # beside what it had not taken then
        fault_fs.clear()
        n1.flush()


@clause("S586")
def test_a_worker_that_takes_over_makes_no_copy_twice(tmp_path: Path, fault_fs: FaultFs) -> None:
    """Neither the origin's, nor the holder's, which counts what the last one held."""
    members = [member(fault_fs, tmp_path, name) for name in ("saves", "holds")]
    with mounted(*members) as (saves, holds):
        frozen(fault_fs, "saves")
        save(saves, {"one": b"1" * MIB, "two": b"2" * MIB})
        wait_copied(saves, 2)
        before = holds.status()["held"]
        saves.kill_worker()
        status = wait_copied(saves, 2)
        assert status["worker"]["number"] == 2
        assert status["copies"]["copied_files"] == 0
        assert held(holds) == {"saves": [b"1" * MIB, b"2" * MIB]}
        holds.kill_worker()
        saves.wait_status(lambda now: now["copies"]["failures"] > 0)
        status = wait_copied(saves, 2)
        assert status["copies"]["copied_files"] == 0
        told = holds.wait_status(all_is_counted)
        assert told["worker"]["number"] == 2
        assert before[0]["node"] == told["held"][0]["node"]
        fault_fs.clear()
        saves.flush()


@clause("S581")
def test_what_cannot_be_is_refused_with_a_sentence(tmp_path: Path, fault_fs: FaultFs) -> None:
    for options, why in (
        ({"exchange": "off"}, "copies = 1 needs exchange"),
        ({"spill": tmp_path}, "only one of the two"),
    ):
        one = member(fault_fs, tmp_path, "one", **options)
        with pytest.raises(CommandError) as caught:
            one.start()
        assert why in caught.value.stderr


@clause("S589")
def test_fsync_returns_when_another_member_has_it_or_it_is_persisted(
    tmp_path: Path, fault_fs: FaultFs
) -> None:
    saves = member(fault_fs, tmp_path, "saves", fsync="copied")
    holds = member(fault_fs, tmp_path, "holds")
    with mounted(saves, holds), ThreadPoolExecutor() as pool:
        frozen(fault_fs, "saves")
        data = os.urandom(3 * MIB)
        stored(saves.path / "one", data)
        # at this moment, behind a storage that hangs, the loss of this node would not lose it
        assert held(holds) == {"saves": [data]}
        (journal,) = holds.runtime_dir.rglob("mirror-*.log")
        assert b"one" in journal.read_bytes()
        sync_directory(saves.path)
        stop_processes(holds.living())
        waiting = pool.submit(stored, saves.path / "two", b"2")
        saves.wait_status(lambda now: now["queue_length"] == 2)
        assert not waiting.done()
        fault_fs.clear()
        waiting.result()  # persisted: the storage answers, and the holder does not
        assert (fault_fs.path / "two").read_bytes() == b"2"
        for process in holds.living():
            os.kill(process, signal.SIGCONT)


@clause("S589")
def test_without_a_copy_what_is_to_be_copied_is_persisted(
    tmp_path: Path, fault_fs: FaultFs
) -> None:
    """For a directory, too, that says so for itself."""
    with member(fault_fs, tmp_path, "saves", copies=0) as saves:
        (saves.path / "run").mkdir()
        os.setxattr(saves.path / "run", "user.acpfs.fsync", b"copied")
        stored(saves.path / "run" / "one", b"1")
        assert (fault_fs.path / "run" / "one").read_bytes() == b"1"


@clause("S603")
def test_people_see_where_each_checkpoint_lies(tmp_path: Path, fault_fs: FaultFs) -> None:
    members = [member(fault_fs, tmp_path, name) for name in ("saves", "holds")]
    with mounted(*members) as (saves, holds):
        (saves.path / "step-1").mkdir()
        (saves.path / "step-1" / "model").write_bytes(b"1" * MIB)
        saves.flush()
        frozen(fault_fs, "saves")
        (saves.path / "step-2").mkdir()
        for name in ("model", "optimizer"):
            (saves.path / "step-2" / name).write_bytes(b"2" * MIB)
        wait_copied(saves, 2)
        text = saves.run("acpfs-ctl", str(saves.path), "checkpoints").stdout
        rows = {line.split()[0]: line for line in text.splitlines() if "step-" in line}
        assert "on the storage" in rows["step-1"]
        assert "here and at holds" in rows["step-2"]
        found = {one["path"]: one for one in saves.ctl("checkpoints")}
        assert (found["step-2"]["copied_files"], found["step-2"]["holder"]) == (2, "holds")
        (ours,) = [one for one in saves.ctl("nodes") if one["node"] == "holds"]
        assert ours["is_holder"]

        def agree() -> bool:
            """Copies of what was drained go behind it: both are asked until nothing moves."""
            (theirs,) = [one for one in holds.ctl("nodes") if one["node"] == "saves"]
            return bool(theirs["held_bytes"] == holds.status()["ram"]["held_bytes"])

        until(agree, "nodes and status say the same")
        fault_fs.clear()
        saves.flush()


@clause("S590")
def test_wait_says_which_of_both_was_first(tmp_path: Path, fault_fs: FaultFs) -> None:
    members = [member(fault_fs, tmp_path, name) for name in ("saves", "holds")]
    with mounted(*members) as (saves, holds):
        frozen(fault_fs, "saves")
        save(saves, {"one": b"1" * MIB})
        words = ("wait", "--copied", str(saves.path / "one"))
        assert saves.run("acpfs-ctl", str(saves.path), *words).stdout.startswith("copied: ")
        assert held(holds) == {"saves": [b"1" * MIB]}
        stop_processes(holds.living())
        save(saves, {"two": b"2"})
        late = saves.run(
            "acpfs-ctl",
            str(saves.path),
            *("wait", "--copied", "--timeout", "0.2", str(saves.path / "two")),
            check=False,
        )
        assert late.returncode == ExitCode.TIMEOUT
        fault_fs.clear()
        saves.flush()
        words = ("wait", "--copied", str(saves.path / "two"))
        assert saves.run("acpfs-ctl", str(saves.path), *words).stdout.startswith("persisted: ")
        for process in holds.living():
            os.kill(process, signal.SIGCONT)


@clause("S618", "T54")
def test_a_program_hears_when_another_node_has_it_and_a_gasp_ends_then(
    tmp_path: Path, fault_fs: FaultFs, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [member(fault_fs, tmp_path, name) for name in ("saves", "holds")]
    with mounted(*members) as (saves, holds):
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(saves.runtime_dir))
        frozen(fault_fs, "saves")
        gasp = saves.path / "step-7"
        gasp.mkdir()
        (gasp / "model").write_bytes(b"1" * MIB)
        (saves.path / "latest").write_bytes(b"step-7")
        assert client.wait_copied(gasp) is Durability.COPIED
        # the copy may be behind for a moment with what else is logged, such as `latest`
        until(lambda: client.durability(gasp) is Durability.COPIED, "copied")
        assert b"1" * MIB in held(holds)["saves"]
        assert gasps.wait_safe(gasp, saves.path / "latest", "copied", 60.0)
        assert b"step-7" in held(holds)["saves"]
        assert not gasps.wait_safe(gasp, saves.path / "latest", "persisted", 0.0)
        # a name that another node has given, and that is on the storage here later
        assert gasps.wait_safe(saves.path / "step-8", None, "copied", 0.0)
        stop_processes(holds.living())
        (gasp / "optimizer").write_bytes(b"2")
        assert client.durability(gasp) is Durability.RAM
        with pytest.raises(DeadlineError):
            client.wait_copied(gasp, 0.1)
        assert not gasps.wait_safe(gasp, None, "copied", 0.1)
        fault_fs.clear()
        for process in holds.living():
            os.kill(process, signal.SIGCONT)
        saves.flush()  # `latest`, and what is behind it, waits for a node that is silent
        assert client.wait_copied(gasp) is Durability.PERSISTED
        assert client.durability(gasp) is Durability.PERSISTED
