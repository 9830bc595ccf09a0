"""How much memory there is for a RAM tier: the machine's, or less where a control group says so.

Pure reading of /proc and /sys; roots are parameters so that tests can lay out a machine of their own. Thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from acpfs.config import RAM_BYTES_MIN
from acpfs.errors import MachineError

PAGE_BYTES = 4096
DAEMON_BYTES = 256 << 20
"""What a busy worker takes beside the RAM tier, and its template and supervisor."""
UNLIMITED_BYTES = 1 << 60
"""A v1 control group without a limit reports about 2^63; anything as large as this is no limit."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the machine has, and what the tightest control group around this process allows."""

    machine_bytes: int
    cgroup_bytes: int | None
    cgroup: str = ""

    @property
    def usable_bytes(self) -> int:
        """The smaller of both."""
        return self.machine_bytes if self.cgroup_bytes is None else min(self.machine_bytes, self.cgroup_bytes)


def read_memory(proc: Path = Path("/proc")) -> Memory:
    """Memory as seen from this process."""
    machine = _machine_bytes(proc / "meminfo")
    limits = [(limit, name) for name, limit in _cgroup_limits(proc) if limit < UNLIMITED_BYTES]
    if not limits:
        return Memory(machine, None)
    limit, name = min(limits)
    return Memory(machine, limit, name)


def headroom_bytes(pid: int, proc: Path = Path("/proc")) -> int | None:
    """How much more memory a process may charge to its control group, by the tightest one around it; None: there is no limit."""
    rooms = []
    for directory, limit in _cgroup_limits(proc, str(pid)):
        if limit < UNLIMITED_BYTES:
            rooms.append(limit - _charged_bytes(Path(directory)))
    return max(0, min(rooms)) if rooms else None


def _charged_bytes(group: Path) -> int:
    """What is charged to a group and could not be given back: its use, less its inactive page cache."""
    for name in ("memory.current", "memory.usage_in_bytes"):
        try:
            used = int((group / name).read_text())
        except (OSError, ValueError):
            continue
        return max(0, used - _inactive_file_bytes(group / "memory.stat"))
    return 0


def _inactive_file_bytes(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(values.get("total_inactive_file", values.get("inactive_file", "0")))


def budget_bytes(wanted: int | str, memory: Memory) -> int:
    """The RAM tier's budget for a setting such as `25%` or a number of bytes.

    Raises:
        MachineError: more than the machine or the control group has.
    """
    if isinstance(wanted, str):
        share = int(memory.usable_bytes * float(wanted.rstrip("%")) / 100)
        return max(RAM_BYTES_MIN, share // PAGE_BYTES * PAGE_BYTES)
    if wanted > memory.machine_bytes:
        raise MachineError(f"ram = {_gib(wanted)} is more than this machine has ({_gib(memory.machine_bytes)})")
    if wanted > memory.usable_bytes:
        raise MachineError(f"ram = {_gib(wanted)} is more than the control group {memory.cgroup} allows ({_gib(memory.usable_bytes)})")
    return wanted


def unfit(budget: int, memory: Memory) -> str:
    """What is wrong with a budget that the control group around this process has no room for now; "" for nothing.

    The group may have got its limit, or a smaller one, after the mount; and what the daemon itself needs is charged to it, too.
    """
    if memory.cgroup_bytes is None or budget + DAEMON_BYTES <= memory.cgroup_bytes:
        return ""
    allowed, wanted = _gib(memory.cgroup_bytes), f"{_gib(budget)} and some {DAEMON_BYTES >> 20} MiB for the daemon"
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


def _cgroup_limits(proc: Path, process: str = "self") -> list[tuple[str, int]]:
    """(group, limit) of a process's memory group and of all groups around it, v1 and v2."""
    mounts = _cgroup_mounts(proc / "self" / "mountinfo")
    found: list[tuple[str, int]] = []
    try:
        lines = (proc / process / "cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _number, controllers, group = line.split(":", 2)
        kind = "v2" if not controllers else "v1"
        if kind == "v1" and "memory" not in controllers.split(","):
            continue
        file = "memory.max" if kind == "v2" else "memory.limit_in_bytes"
        for root, mount_point in mounts.get(kind, ()):
            found += _limits_up_from(Path(mount_point), root, group, file)
    return found


def _cgroup_mounts(mountinfo: Path) -> dict[str, list[tuple[str, str]]]:
    """Kind of hierarchy → (root, mount point) of its mounts; of v1 only the memory controller's."""
    mounts: dict[str, list[tuple[str, str]]] = {}
    try:
        lines = mountinfo.read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        fields, _dash, rest = line.partition(" - ")
        kind, _source, options = rest.split(" ", 2)
        root, mount_point = fields.split()[3:5]
        if kind == "cgroup2":
            mounts.setdefault("v2", []).append((root, mount_point))
        elif kind == "cgroup" and "memory" in options.split(","):
            mounts.setdefault("v1", []).append((root, mount_point))
    return mounts


def _limits_up_from(mount_point: Path, root: str, group: str, file: str) -> list[tuple[str, int]]:
    """Limits of `group` and its ancestors. Inside a container the mount shows only the part below `root`."""
    below = group[len(root) :] if root != "/" and group.startswith(root) else group
    parts = [part for part in below.split("/") if part and part != ".."]
    found = []
    for depth in range(len(parts), -1, -1):
        directory = mount_point.joinpath(*parts[:depth])
        try:
            text = (directory / file).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            found.append((str(directory), int(text)))
    return found
