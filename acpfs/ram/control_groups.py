"""Memory control groups, v1 and v2: which limits hold for a process, and how much room they leave.

Pure reading of /proc and /sys; roots are parameters so that tests can lay out a machine of their
own. What cannot be seen is not known, which is another answer than "no limit". Thread-safe.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from acpfs.processes import PROC, directory_of

UNLIMITED_BYTES = 1 << 60
"""A v1 control group without a limit reports about 2^63; anything as large as this is no limit."""
_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
"""Files of v2 and v1.

Beyond `high` the kernel does not kill, but it brings the group to a standstill: our pages cannot be
swapped out.
"""


@dataclass(frozen=True, slots=True)
class LimitedGroup:
    """A control group that may not use more memory than this."""

    directory: Path
    limit_bytes: int

    def room_bytes(self) -> int:
        """What could still be charged to it: its limit, less what it uses and could not give
        back.
        """
        return max(0, self.limit_bytes - _charged_bytes(self.directory))


def limits_of_caller(pid: int, proc: Path = PROC) -> list[LimitedGroup] | None:
    """The limits around the process that makes a call, its own group's first; None: they are not
    known.
    """
    directory = directory_of(pid, proc)
    return None if directory is None else _limits(directory, proc)


def own_limits(proc: Path = PROC) -> list[LimitedGroup]:
    """The limits around this process, as far as they can be seen."""
    return _limits(proc / "self", proc) or []


def limit_of(directory: Path) -> LimitedGroup | None:
    """A group's limit as it is now; None: it has none, or the memory controller is not enabled
    there, or the group is gone.
    """
    found = []
    for file in _LIMITS:
        with contextlib.suppress(OSError):
            text = (directory / file).read_text().strip()
            found += [int(text)] if text.isdigit() and int(text) < UNLIMITED_BYTES else []
    return LimitedGroup(directory, min(found)) if found else None


def _limits(process: Path, proc: Path) -> list[LimitedGroup] | None:
    try:
        # Groups are called what their users like, in whatever encoding.
        lines = os.fsdecode((process / "cgroup").read_bytes()).split("\n")
    except OSError:
        return None  # gone, or hidden (hidepid)
    groups = {
        "v2" if not controllers else "v1": group
        for controllers, group in map(_membership, filter(None, lines))
        if _may_limit(controllers)
    }
    if not groups:
        return []  # the kernel has no memory controller
    kind = "v1" if "v1" in groups else "v2"  # the controller belongs to one hierarchy only
    for root, mount_point in _mounts(proc / "self" / "mountinfo", kind):
        parts = _parts_below(root, groups[kind])
        if parts is not None and mount_point.joinpath(*parts).is_dir():
            return _limits_up_from(mount_point, parts)
    return None


def _membership(line: str) -> tuple[str, str]:
    _number, controllers, group = line.split(":", 2)
    return controllers, group


def _may_limit(controllers: str) -> bool:
    return not controllers or "memory" in controllers.split(",")


def _mounts(mountinfo: Path, kind: str) -> list[tuple[str, Path]]:
    """(root, mount point) of the mounts of a kind of hierarchy; of v1 only the memory
    controller's.
    """
    try:
        # Others' mounts are called what they like, in whatever encoding.
        lines = os.fsdecode(mountinfo.read_bytes()).split("\n")
    except OSError:
        return []
    found = []
    for line in filter(None, lines):
        fields, _dash, rest = line.partition(" - ")
        name, _source, options = rest.split(" ", 2)
        root, mount_point = fields.split(" ")[3:5]
        if (
            (name == "cgroup2")
            if kind == "v2"
            else (name == "cgroup" and "memory" in options.split(","))
        ):
            found.append((root, Path(mount_point)))
    return found


def _parts_below(root: str, group: str) -> list[str] | None:
    """Where a group lies below a mount's root; None: it does not, or outside of our control group
    namespace (`/..`).

    Inside a container the mount shows only the part below `root`.
    """
    inside = [part for part in root.split("/") if part]
    parts = [part for part in group.split("/") if part]
    return parts[len(inside) :] if parts[: len(inside)] == inside and ".." not in parts else None


def _limits_up_from(mount_point: Path, parts: list[str]) -> list[LimitedGroup]:
    """Limits of a group and its ancestors, as far as the mount shows them: those above are common
    to all who see it.
    """
    groups = (limit_of(mount_point.joinpath(*parts[:depth])) for depth in range(len(parts), -1, -1))
    return [group for group in groups if group is not None]


def _charged_bytes(group: Path) -> int:
    """What is charged to a group and could not be given back: its use, less its inactive page
    cache.
    """
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
