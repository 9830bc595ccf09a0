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
from typing import NamedTuple

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import ASIDE_PREFIX, Lower, LowerPath
from acpfs.backing.member_records import RECORD_VERSION, NodeRecords, NodeState
from acpfs.backing.terms import node_and_term
from acpfs.errors import unknown_version
from acpfs.runtime.clock import Clock

HARDWARE = Path("/sys/class/dmi/id/product_uuid")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
RECORD_BYTES_MAX = 1 << 16
_HOST_CHARACTERS_MAX = 40
MIRRORS = b"mirrors"
"""Directory of marks, by node id: whose RAM tier is mirrored on a disk
(`writeback.sources.mirror`).
"""
JOURNALS = b"journals"
"""Directory of journals that are on the storage, by node id, a plus sign and more
(`writeback.copies.on_storage`).
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
    for encoded, names in _by_node(directory.list_own((b"staging",))).items():
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
        claim = directory.newest_claim(encoded)
        if claim is not None and claim.by not in ("", node):
            continue  # whoever has taken its log over drains it, with what is staged
        areas = [(), *sorted(directory.areas_of(encoded))]
        files = _files(directory, encoded, areas, names)
        said += _kept(directory, encoded, areas)
        said += [
            "an exchange of two names was cut off: "
            f"{file.shown(directory)} is one of the two, move it back"
            for file in files
            if _is_aside(file.name)
        ]
        if machine.hardware and record.get("hardware") == machine.hardware:
            _remove(directory, encoded, areas, files, clock)
        elif files:
            places = " and ".join(
                sorted({file.shown(directory).rpartition("/")[0] for file in files})
            )
            said.append(
                f"node id {node} left {len(files)} staging files before a host named "
                f"{machine.host} was started again: "
                f"remove {places} if that was this machine"
            )
    return said


class _Staged(NamedTuple):
    """A staging file of a node that is no more."""

    area: LowerPath
    directory: bytes
    """Name of the staging directory, of whichever term."""
    name: bytes

    def shown(self, directory: BackingDirectory) -> str:
        """Where it is, for people."""
        of = self.directory.decode("utf-8", "replace")
        name = self.name.decode("utf-8", "backslashreplace")
        return f"{_shown(directory, self.area)}/.acpfs/staging/{of}/{name}"


def _by_node(names: list[bytes]) -> dict[bytes, list[bytes]]:
    """Node ids, and what there is of each among the staging directories."""
    found: dict[bytes, list[bytes]] = {}
    for name in names:
        found.setdefault(node_and_term(name)[0], []).append(name)
    return found


def _directories(
    directory: BackingDirectory, node: bytes, area: LowerPath, names: list[bytes]
) -> list[bytes]:
    """Staging directories of a node in an area; `names`: those in the top."""
    return _by_node(directory.list_own((b"staging",), area)).get(node, []) if area else names


def _files(
    directory: BackingDirectory, node: bytes, areas: list[LowerPath], names: list[bytes]
) -> list[_Staged]:
    found = []
    for area in areas:
        for of in _directories(directory, node, area, names):
            with contextlib.suppress(NotADirectoryError):  # the bar that earlier terms leave
                listed = directory.list_own((b"staging", of), area)
                found += [_Staged(area, of, name) for name in listed]
    return found


def _record(directory: BackingDirectory, node: bytes) -> dict[str, object]:
    with contextlib.suppress(FileNotFoundError, ValueError):
        found = json.loads(directory.read_own((b"nodes", node))[:RECORD_BYTES_MAX])
        # what a newer acpfs may mean otherwise proves nothing
        if isinstance(found, dict) and not unknown_version(
            "its record", found.get("record_version", 1), RECORD_VERSION, ""
        ):
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
    files: list[_Staged],
    clock: Clock,
) -> None:
    """The directory of staging files at the top last: by it the next mount finds what is left to do
    where this one was cut off.
    """
    for file in files:
        if not _is_aside(file.name):
            directory.remove_own((b"staging", file.directory, file.name), file.area)
    for area in areas:
        with contextlib.suppress(OSError):  # not empty: a checkpoint that the guard kept
            directory.remove_own_directory((b"kept", node), area)
    _mark_gone(NodeRecords(directory), node.decode("utf-8", "replace"), clock)
    if any(_is_aside(file.name) for file in files):
        return
    for area in reversed(areas[1:]):
        _remove_directories(directory, node, area)
    directory.remove_own((b"areas", node))
    directory.remove_claims(node)
    forget_journals(directory, node)
    _remove_directories(directory, node, ())


def forget_journals(lower: Lower, node: bytes) -> None:
    """None of a node's counts any more."""
    for name in lower.list_own((JOURNALS,)):
        if name.partition(b"+")[0] == node:
            lower.remove_own((JOURNALS, name))


def _remove_directories(directory: BackingDirectory, node: bytes, area: LowerPath) -> None:
    for name in _by_node(directory.list_own((b"staging",), area)).get(node, []):
        try:
            directory.remove_own_directory((b"staging", name), area)
        except NotADirectoryError:
            directory.remove_own((b"staging", name), area)


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
