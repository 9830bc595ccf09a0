"""Staging files of node ids that are no more: a machine that was started again has lost its RAM
tiers, and with them the node ids.

A node id that is chosen (`--node-id`) is the same after a reboot, and its own mount cleans up. A
random one is not, and nobody else may touch what might be another's only copy of a file (overflow).
So what an id left is removed only with proof: its record names this very machine by the hardware's
own number, and an earlier boot of it. Without proof it is named, and left. Blocks as the backing
directory does.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import ASIDE_PREFIX, LowerPath
from acpfs.backing.member_records import RECORD_VERSION, NodeRecords, NodeState
from acpfs.runtime.clock import Clock

HARDWARE = Path("/sys/class/dmi/id/product_uuid")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
RECORD_BYTES_MAX = 1 << 16
_HOST_CHARACTERS_MAX = 40
MIRRORS = b"mirrors"
"""Directory of marks, by node id: whose RAM tier is mirrored on a disk
(`writeback.sources.mirror`).
"""
WITHDRAWN = b"{}\n"
"""A mark that says that there is no mirror (any more)."""


@dataclass(frozen=True, slots=True)
class MachineId:
    """What tells this machine, and this run of it, from all others."""

    host: str
    hardware: str
    """"" where the hardware has no number of its own that can be read (containers of some kinds,
    small virtual machines).
    """
    boot_id: str

    @classmethod
    def this(cls) -> MachineId:
        """The one that this process runs on."""
        hardware = _line(HARDWARE).lower()
        digits = set(hardware) - {"-"}
        return cls(
            socket.gethostname(),
            "" if digits <= {"0"} or digits <= {"f"} else hardware,
            _line(BOOT_ID),
        )

    def prefix(self) -> str:
        """Of the node ids that are made here."""
        name = re.sub(r"[^A-Za-z0-9-]", "-", self.host.split(".")[0])[:_HOST_CHARACTERS_MAX].strip(
            "-"
        )
        return f"{name or 'node'}-"


def _line(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def clear(directory: BackingDirectory, machine: MachineId, clock: Clock) -> list[str]:
    """Remove what earlier boots of this machine left; returns sentences about what may be such and
    may not.
    """
    said = []
    for encoded in directory.list_own((b"staging",)):
        node = encoded.decode("utf-8", "replace")
        if node == directory.node_id or not node.startswith(machine.prefix()):
            # only those are looked at: with a thousand nodes over one directory, reading a thousand
            # records takes long
            continue
        record = _record(directory, encoded)
        if (
            record.get("host") != machine.host
            or record.get("boot_id") in (None, "", machine.boot_id)
            or not machine.boot_id
        ):
            continue
        if _is_mirrored(directory, encoded):
            said.append(
                f"node id {node} left a mirror that is not drained: mount again as before to "
                "drain it"
            )
            continue  # its RAM tier is not lost, and what was staged has no other copy there
        areas = [(), *sorted(directory.areas_of(encoded))]
        files = [
            (area, name)
            for area in areas
            for name in directory.list_own((b"staging", encoded), area)
        ]
        said += _kept(directory, encoded, areas)
        for area, aside in (
            (area, name.decode("utf-8", "backslashreplace"))
            for area, name in files
            if _is_aside(name)
        ):
            place = f"{_shown(directory, area)}/.acpfs/staging/{node}/{aside}"
            said.append(
                f"an exchange of two names was cut off: {place} is one of the two, move it back"
            )
        if machine.hardware and record.get("hardware") == machine.hardware:
            _remove(directory, encoded, areas, files, clock)
        elif files:
            places = " and ".join(
                f"{_shown(directory, area)}/.acpfs/staging/{node}" for area in dict(files)
            )
            said.append(
                f"node id {node} left {len(files)} staging files before a host named "
                f"{machine.host} was started again: "
                f"remove {places} if that was this machine"
            )
    return said


def _record(directory: BackingDirectory, node: bytes) -> dict[str, object]:
    with contextlib.suppress(FileNotFoundError, ValueError):
        found = json.loads(directory.read_own((b"nodes", node))[:RECORD_BYTES_MAX])
        # what a newer acpfs may mean otherwise proves nothing
        if isinstance(found, dict) and found.get("record_version", 1) == RECORD_VERSION:
            return found
    return {}


def _is_mirrored(directory: BackingDirectory, node: bytes) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return directory.read_own((MIRRORS, node)) != WITHDRAWN
    return False


def _kept(directory: BackingDirectory, node: bytes, areas: list[LowerPath]) -> list[str]:
    """Perhaps the last whole checkpoint of a run: for people to decide."""
    return [
        "an earlier mount kept an old checkpoint as "
        f"{_shown(directory, area)}/.acpfs/kept/{node.decode('utf-8', 'replace')}/"
        f"{name.decode('utf-8', 'backslashreplace')}: move it back, or remove it"
        for area in areas
        for name in directory.list_own((b"kept", node), area)
    ]


def _shown(directory: BackingDirectory, area: LowerPath) -> str:
    return "/".join(
        [str(directory.path), *(name.decode("utf-8", "backslashreplace") for name in area)]
    )


def _is_aside(name: bytes) -> bool:
    return name.startswith(ASIDE_PREFIX.encode())


def _remove(
    directory: BackingDirectory,
    node: bytes,
    areas: list[LowerPath],
    files: list[tuple[LowerPath, bytes]],
    clock: Clock,
) -> None:
    """The directory of staging files at the top last: by it the next mount finds what is left to do
    where this one was cut off.
    """
    for area, name in files:
        if not _is_aside(name):
            directory.remove_own((b"staging", node, name), area)
    for area in areas:
        with contextlib.suppress(OSError):  # not empty: a checkpoint that the guard kept
            directory.remove_own_directory((b"kept", node), area)
    _mark_gone(NodeRecords(directory), node.decode("utf-8", "replace"), clock)
    if any(_is_aside(name) for _area, name in files):
        return
    for area in reversed(areas[1:]):
        directory.remove_own_directory((b"staging", node), area)
    directory.remove_own((b"areas", node))
    directory.remove_own_directory((b"staging", node))


def _mark_gone(records: NodeRecords, node: str, clock: Clock) -> None:
    """What it had not persisted is lost: other members hold pointers of that time back, and do not
    wait for it any longer.
    """
    try:
        record = records.read(node)
    except ValueError:
        record = None
    if record is None or record.state is NodeState.LEFT:
        records.remove(node)
        return
    if record.state is NodeState.GONE:
        return  # by a mount that was cut off
    booted_at = clock.wall() - clock.since_boot()
    since = min(record.watermark, record.lost[0]) if record.lost else record.watermark
    records.publish(
        replace(record, state=NodeState.GONE, lost=(since, booted_at), beat=record.beat + 1)
    )
