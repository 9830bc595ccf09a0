"""The budget follows the machine and the control groups, v1 and v2."""

from pathlib import Path

import pytest

from acpfs.errors import MachineError
from acpfs.ram.memory import Memory, budget_bytes, read_memory, unfit

GIB = 1 << 30


def machine(tmp_path: Path, cgroup: str, mounts: list[str]) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "self" / "mountinfo").write_text("".join(f"{line}\n" for line in mounts))
    return proc


def test_without_a_control_group_it_is_the_machines_memory(tmp_path: Path) -> None:
    memory = read_memory(machine(tmp_path, "", []))
    assert (memory.usable_bytes, memory.cgroup_bytes) == (16 * GIB, None)


def test_v2_takes_the_tightest_limit_of_all_ancestors(tmp_path: Path) -> None:
    root = tmp_path / "cg"
    (root / "a/b/c").mkdir(parents=True)
    (root / "a/memory.max").write_text(f"{4 * GIB}\n")
    (root / "a/b/memory.max").write_text("max\n")
    (root / "a/b/c/memory.max").write_text(f"{6 * GIB}\n")
    memory = read_memory(
        machine(tmp_path, "0::/a/b/c\n", [f"30 20 0:26 / {root} rw - cgroup2 cgroup2 rw"])
    )
    assert memory.usable_bytes == 4 * GIB
    assert memory.cgroup == str(root / "a")


def test_v1_reads_the_memory_controller_only(tmp_path: Path) -> None:
    cpu = tmp_path / "cpu"
    mem = tmp_path / "mem"
    (cpu / "x").mkdir(parents=True)
    (mem / "x").mkdir(parents=True)
    (mem / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (mem / "x/memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    mounts = [
        f"31 20 0:27 / {cpu} rw - cgroup cgroup rw,cpu",
        f"32 20 0:28 / {mem} rw - cgroup cgroup rw,memory",
    ]
    memory = read_memory(machine(tmp_path, "9:cpu:/x\n8:memory:/x\n0::/\n", mounts))
    assert memory.usable_bytes == 2 * GIB


def test_in_a_container_the_mounts_root_is_the_containers_group(tmp_path: Path) -> None:
    root = tmp_path / "cg"
    root.mkdir()
    (root / "memory.max").write_text(f"{GIB}\n")
    memory = read_memory(
        machine(
            tmp_path, "0::/docker/abc\n", [f"30 20 0:26 /docker/abc {root} rw - cgroup2 cgroup2 rw"]
        )
    )
    assert memory.usable_bytes == GIB


def test_a_share_is_a_share_of_what_is_usable() -> None:
    assert budget_bytes("25%", Memory(16 * GIB, 4 * GIB, "g")) == GIB


@pytest.mark.parametrize(
    ("wanted", "said"),
    [(20 * GIB, "more than this machine has"), (5 * GIB, "more than the control group g allows")],
)
def test_more_than_there_is_is_refused(wanted: int, said: str) -> None:
    with pytest.raises(MachineError, match=said):
        budget_bytes(wanted, Memory(16 * GIB, 4 * GIB, "g"))


@pytest.mark.clause("S220")
def test_a_budget_that_the_control_group_has_no_room_for_is_told() -> None:
    assert (
        unfit(15 * GIB, Memory(16 * GIB, None))
        == unfit(3 * GIB, Memory(16 * GIB, 4 * GIB, "g"))
        == ""
    )
    said = unfit(4 * GIB, Memory(16 * GIB, 4 * GIB, "g"))
    assert said.startswith(
        "the control group g allows 4.00 GiB, ram and daemon need 4.00 GiB and some 256 MiB"
    )
    assert unfit(4 * GIB, Memory(16 * GIB, 1 * GIB, "g"))  # it was lowered after the mount


def test_this_machine_can_be_read() -> None:
    assert read_memory().usable_bytes > 0
