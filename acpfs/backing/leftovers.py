"""Staging files of node ids that are no more: a machine that was started again has lost its RAM tiers, and with them the node ids.

A node id that is chosen (`--node-id`) is the same after a reboot, and its own mount cleans up. A random one is not, and nobody else may
touch what might be another's only copy of a file (overflow). So what an id left is removed only with proof: its record names this very
machine by the hardware's own number, and an earlier boot of it. Without proof it is named, and left. Blocks as the backing directory does.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from acpfs.backing.directory import BackingDirectory

HARDWARE = Path("/sys/class/dmi/id/product_uuid")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
RECORD_BYTES_MAX = 1 << 16
_HOST_CHARACTERS_MAX = 40


@dataclass(frozen=True, slots=True)
class Machine:
    """What tells this machine, and this run of it, from all others."""

    host: str
    hardware: str
    """"" where the hardware has no number of its own that can be read (containers of some kinds, small virtual machines)."""
    boot_id: str

    @classmethod
    def this(cls) -> Machine:
        """The one that this process runs on."""
        hardware = _line(HARDWARE).lower()
        digits = set(hardware) - {"-"}
        return cls(socket.gethostname(), "" if digits <= {"0"} or digits <= {"f"} else hardware, _line(BOOT_ID))

    def prefix(self) -> str:
        """Of the node ids that are made here."""
        name = re.sub(r"[^A-Za-z0-9-]", "-", self.host.split(".")[0])[:_HOST_CHARACTERS_MAX].strip("-")
        return f"{name or 'node'}-"


def _line(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def clear(directory: BackingDirectory, machine: Machine) -> list[str]:
    """Remove what earlier boots of this machine left; returns sentences about what may be such and may not."""
    said = []
    for encoded in directory.list_own((b"staging",)):
        node = encoded.decode("utf-8", "replace")
        if node == directory.node_id or not node.startswith(machine.prefix()):
            continue  # only those are looked at: with a thousand nodes over one directory, reading a thousand records takes long
        record = _record(directory, encoded)
        if record.get("host") != machine.host or record.get("boot_id") in (None, "", machine.boot_id) or not machine.boot_id:
            continue
        files = directory.list_own((b"staging", encoded))
        if machine.hardware and record.get("hardware") == machine.hardware:
            _remove(directory, encoded, files)
        elif files:
            said.append(
                f"node id {node} left {len(files)} staging files before a host named {machine.host} was started again: "
                f"remove {directory.path}/.acpfs/staging/{node} if that was this machine"
            )
    return said


def _record(directory: BackingDirectory, node: bytes) -> dict[str, object]:
    with contextlib.suppress(FileNotFoundError, ValueError):
        found = json.loads(directory.read_own((b"nodes", node))[:RECORD_BYTES_MAX])
        return found if isinstance(found, dict) else {}
    return {}


def _remove(directory: BackingDirectory, node: bytes, files: list[bytes]) -> None:
    """The record last: with it the next mount goes on where this one was cut off."""
    for name in files:
        directory.remove_own((b"staging", node, name))
    directory.remove_own_directory((b"staging", node))
    directory.remove_own((b"nodes", node))
