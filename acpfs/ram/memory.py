"""How much memory there is for a RAM tier: the machine's, or less where a control group says so.

Pure reading of /proc and /sys; roots are parameters so that tests can lay out a machine of their
own. Thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from acpfs.config import RAM_BYTES_MIN
from acpfs.errors import MachineError
from acpfs.processes import PROC
from acpfs.ram.control_groups import own_limits

PAGE_BYTES = 4096
DAEMON_BYTES = 256 << 20
"""What a busy worker takes beside the RAM tier, and its template and supervisor."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the machine has, and what the tightest control group around this process allows."""

    machine_bytes: int
    cgroup_bytes: int | None
    cgroup: str = ""

    @property
    def usable_bytes(self) -> int:
        """The smaller of both."""
        return (
            self.machine_bytes
            if self.cgroup_bytes is None
            else min(self.machine_bytes, self.cgroup_bytes)
        )


def read_memory(proc: Path = PROC) -> Memory:
    """Memory as seen from this process."""
    machine = _machine_bytes(proc / "meminfo")
    tightest = min(own_limits(proc), key=lambda group: group.limit_bytes, default=None)
    return (
        Memory(machine, None)
        if tightest is None
        else Memory(machine, tightest.limit_bytes, str(tightest.directory))
    )


def headroom_bytes() -> int | None:
    """How much more memory this process may charge to its control group, by the tightest one around
    it; None: no limit is seen.
    """
    return min((group.room_bytes() for group in own_limits()), default=None)


def budget_bytes(wanted: int | str, memory: Memory) -> int:
    """The RAM tier's budget for a setting such as `25%` or a number of bytes.

    Raises:
        MachineError: more than the machine or the control group has.
    """
    if isinstance(wanted, str):
        share = int(memory.usable_bytes * float(wanted.rstrip("%")) / 100)
        return max(RAM_BYTES_MIN, share // PAGE_BYTES * PAGE_BYTES)
    if wanted > memory.machine_bytes:
        raise MachineError(
            f"ram = {_gib(wanted)} is more than this machine has ({_gib(memory.machine_bytes)})"
        )
    if wanted > memory.usable_bytes:
        raise MachineError(
            f"ram = {_gib(wanted)} is more than the control group {memory.cgroup} allows "
            f"({_gib(memory.usable_bytes)})"
        )
    return wanted


def unfit(budget: int, memory: Memory) -> str:
    """What is wrong with a budget that the control group around this process has no room for now;
    "" for nothing.

    The group may have got its limit, or a smaller one, after the mount; and what the daemon itself
    needs is charged to it, too.
    """
    if memory.cgroup_bytes is None or budget + DAEMON_BYTES <= memory.cgroup_bytes:
        return ""
    allowed = _gib(memory.cgroup_bytes)
    wanted = f"{_gib(budget)} and some {DAEMON_BYTES >> 20} MiB for the daemon"
    return (
        f"the control group {memory.cgroup} allows {allowed}, ram and daemon need {wanted}: "
        "the kernel will kill the daemon before RAM is full; lower ram, or raise the limit"
    )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"


def _machine_bytes(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise MachineError(f"{meminfo} names no MemTotal")
