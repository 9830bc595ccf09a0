"""Memory is made ready without being asked for where it helps, and only memory that nobody uses.

The machines are made up.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from acpfs.ram.prefault_default import (
    CALM_S,
    NOTHING_BYTES,
    SHARE,
    PrefaultChoice,
    UnusedMemory,
    choose,
    is_virtual,
)
from tests.rig.runtime import clock_of

GIB = 1 << 30
pytestmark = pytest.mark.clause("S250")


class Machine:
    """Its /proc and /sys."""

    def __init__(self, top: Path) -> None:
        self.proc = top / "proc"
        self.sys = top / "sys"
        self.now = 1000.0
        self.write(
            "proc/cpuinfo", "processor : 0\nflags : fpu sse2\n\nprocessor : 1\nflags : fpu sse2\n"
        )
        self.free(8 * GIB)
        self.pressure(0.0)

    def write(self, name: str, text: str) -> None:
        path = self.proc.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def free(self, size: int) -> None:
        self.write(
            "proc/meminfo",
            f"MemTotal: {16 * GIB >> 10} kB\nMemFree: {size >> 10} kB\nMemAvailable: "
            f"{15 * GIB >> 10} kB\n",
        )

    def pressure(self, share: float) -> None:
        self.write(
            "proc/pressure/memory",
            f"some avg10={share:.2f} avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 total=0\n",
        )

    def unused(self, takeable: int) -> UnusedMemory:
        return UnusedMemory(lambda: takeable, clock_of(lambda: self.now), self.proc)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_machine_without_a_host_gets_nothing(machine: Machine) -> None:
    machine.write("sys/class/dmi/id/sys_vendor", "Huawei\n")
    assert not is_virtual(machine.proc, machine.sys)
    assert choose(None, machine.proc, machine.sys).wanted == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("proc/cpuinfo", "processor : 0\nflags : fpu hypervisor sse2\n"),
        ("sys/hypervisor/type", "xen\n"),
        ("sys/class/dmi/id/sys_vendor", "QEMU\n"),
        ("sys/class/dmi/id/product_name", "KVM Virtual Machine\n"),
    ],
)
def test_a_virtual_machine_gets_a_quarter_of_the_budget(
    machine: Machine, name: str, text: str
) -> None:
    machine.write(name, text)
    assert is_virtual(machine.proc, machine.sys)
    assert choose(None, machine.proc, machine.sys).wanted == SHARE


@pytest.mark.clause("S271")
def test_where_saves_are_known_to_need_more_it_is_up_to_half_of_the_budget(
    machine: Machine,
) -> None:
    machine.write("sys/hypervisor/type", "xen\n")
    choice = choose(None, machine.proc, machine.sys)
    assert [choice.bytes(8 * GIB, save) for save in (0, GIB, 3 * GIB, 5 * GIB)] == [
        2 * GIB,
        2 * GIB,
        3 * GIB,
        4 * GIB,
    ]
    assert PrefaultChoice(GIB, "set").bytes(8 * GIB, 3 * GIB) == GIB


def test_a_limited_group_keeps_its_memory(machine: Machine) -> None:
    machine.write("sys/hypervisor/type", "xen\n")
    choice = choose(4 * GIB, machine.proc, machine.sys)
    assert choice.wanted == 0
    assert "limit" in choice.reason


def test_page_cache_is_not_unused(machine: Machine) -> None:
    assert machine.unused(15 * GIB).bytes() == 8 * GIB
    assert machine.unused(GIB).bytes() == GIB
    machine.free(0)
    assert machine.unused(15 * GIB).bytes() == 0


def test_nothing_while_somebody_waits_for_memory_and_a_while_after(machine: Machine) -> None:
    unused = machine.unused(15 * GIB)
    machine.pressure(7.5)
    assert unused.bytes() == NOTHING_BYTES
    machine.pressure(0.0)
    machine.now += CALM_S - 1
    assert unused.bytes() == NOTHING_BYTES
    machine.now += 1
    assert unused.bytes() == 8 * GIB


def test_a_kernel_that_does_not_count_pressure(machine: Machine) -> None:
    (machine.proc / "pressure/memory").unlink()
    assert machine.unused(15 * GIB).bytes() == 8 * GIB
