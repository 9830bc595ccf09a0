"""What is known of a caller's memory limits, and that "not known" is another answer than "no
limit".
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from acpfs.ram.control_groups import LimitedGroup, limits_of_caller, own_limits

GIB = 1 << 30
CALLER = 4321
V1 = "9:cpu:/x\n8:memory:{}\n0::/elsewhere\n"
V2 = "0::{}\n"


class Machine:
    """A made-up /proc and one hierarchy of control groups."""

    def __init__(self, base: Path, kind: str = "v2", root: str = "/") -> None:
        self.proc = base / "proc"
        self.top = base / "groups"
        self._v1 = kind == "v1"
        own = self.proc / str(os.getpid())
        own.mkdir(parents=True)
        (self.proc / "self").symlink_to(own.name)
        self.top.mkdir()
        kinds = "cgroup cgroup rw,memory" if self._v1 else "cgroup2 cgroup2 rw"
        (own / "mountinfo").write_text(f"30 20 0:26 {root} {self.top} rw - {kinds}\n")

    def add_caller(self, group: str) -> None:
        (self.proc / str(CALLER)).mkdir()
        (self.proc / str(CALLER) / "cgroup").write_text((V1 if self._v1 else V2).format(group))

    def add_group(self, path: str, limit: str, used: int = 0) -> Path:
        directory = self.top / path
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ("memory.limit_in_bytes" if self._v1 else "memory.max")).write_text(
            f"{limit}\n"
        )
        (directory / ("memory.usage_in_bytes" if self._v1 else "memory.current")).write_text(
            f"{used}\n"
        )
        return directory

    def limits(self) -> list[LimitedGroup] | None:
        return limits_of_caller(CALLER, self.proc)


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_the_limits_of_a_caller_are_those_of_its_group_and_all_around_it(
    tmp_path: Path, kind: str
) -> None:
    machine = Machine(tmp_path, kind)
    machine.add_caller("/pod/trainer")
    pod = machine.add_group("pod", str(4 * GIB), used=GIB)
    trainer = machine.add_group("pod/trainer", str(2 * GIB), used=GIB // 2)
    machine.add_group("pod/other", "1")
    assert machine.limits() == [LimitedGroup(trainer, 2 * GIB), LimitedGroup(pod, 4 * GIB)]
    assert [group.room_bytes() for group in machine.limits() or ()] == [2 * GIB - GIB // 2, 3 * GIB]


@pytest.mark.clause("S537")
def test_whatever_others_call_their_mounts(tmp_path: Path) -> None:
    """No mount started on a machine that had one with a name in another encoding."""
    machine = Machine(tmp_path)
    machine.add_caller("/pod")
    machine.add_group("pod", str(GIB))
    table = machine.proc / "self" / "mountinfo"
    others = [b"/a\xff", "/b\N{LINE SEPARATOR}c\N{NO-BREAK SPACE}d".encode()]
    lines = [b"31 20 0:27 / %s rw - tmpfs tmpfs rw\n" % name for name in others]
    table.write_bytes(b"".join(lines) + table.read_bytes())
    limits = machine.limits()
    assert limits is not None
    assert [one.limit_bytes for one in limits] == [GIB]


@pytest.mark.clause("S537")
def test_whatever_a_caller_calls_its_group(tmp_path: Path) -> None:
    """Its open of a file in passthrough ended the worker, and eight of them the mount."""
    name = os.fsdecode(b"a\xff\xc2\x85b")
    machine = Machine(tmp_path)
    machine.add_caller("/")
    machine.add_group(name, str(GIB))
    (machine.proc / str(CALLER) / "cgroup").write_bytes(os.fsencode(f"0::/{name}\n"))
    limits = machine.limits()
    assert limits is not None
    assert [one.limit_bytes for one in limits] == [GIB]


def test_page_cache_that_can_be_given_back_is_room(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.add_caller("/a")
    group = machine.add_group("a", str(4 * GIB), used=3 * GIB)
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n")
    assert [group.room_bytes() for group in machine.limits() or ()] == [2 * GIB]


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_no_limit_is_known_where_all_groups_are_seen(tmp_path: Path, kind: str) -> None:
    machine = Machine(tmp_path, kind)
    machine.add_caller("/a")
    machine.add_group("a", "max" if kind == "v2" else "9223372036854771712")
    assert machine.limits() == []


def test_a_kernel_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.add_caller("/")
    (machine.proc / str(CALLER) / "cgroup").write_text("")
    assert machine.limits() == []


@pytest.mark.clause("S243")
@pytest.mark.parametrize(
    ("root", "group"),
    [
        ("/", "/../other"),
        ("/docker/a", "/docker/b"),
        ("/", "/of/another/mount"),
        ("/docker/a", "/docker/a/../b"),
        ("/docker/a", "/docker/ab"),
    ],
    ids=[
        "outside of the namespace",
        "outside of the mount",
        "not in the mount",
        "beside the mount",
        "beside the mount, by name",
    ],
)
def test_the_limits_of_a_group_that_cannot_be_seen_are_not_known(
    tmp_path: Path, root: str, group: str
) -> None:
    machine = Machine(tmp_path, root=root)
    machine.add_group("", str(GIB))
    machine.add_caller(group)
    assert machine.limits() is None


@pytest.mark.clause("S243")
def test_the_limits_of_a_caller_that_cannot_be_seen_are_not_known(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert machine.limits() is None, "hidden"
    machine.add_caller("/")
    assert machine.limits() == []
    assert limits_of_caller(0, machine.proc) is None, "in another PID namespace"
    (machine.proc / str(os.getpid()) / "mountinfo").write_text("")
    assert machine.limits() is None, "no hierarchy is mounted here"
    assert own_limits(machine.proc) == []


def test_this_machine_can_be_read() -> None:
    assert limits_of_caller(os.getpid()) is not None
