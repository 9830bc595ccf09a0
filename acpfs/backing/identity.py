"""Who this mount is among all that share a backing directory (signatures first; being filled)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from acpfs.backing.directory import BackingDirectory


def node_id(runtime_dir: Path, mountpoint: Path, chosen: str | None = None) -> str:
    """`chosen`, or `<host>-<8 hex>` that is made at the first mount on this mount point and kept in the runtime directory."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Identity:
    """Held as long as the mount lives."""

    node_id: str
    volume_id: str
    """Of the backing directory: 32 hex digits, made by its first mount, `.acpfs/volume`."""
    lock_fd: int

    def release(self) -> None:
        """Let another mount have it."""


def claim(directory: BackingDirectory, runtime_dir: Path, mountpoint: Path) -> Identity:
    """Read or make the volume id, lock (volume, node) on this machine, write `.acpfs/nodes/<node>`.

    Raises:
        RefusedError: another mount of the same backing directory under the same node id lives on this machine.
    """
    raise NotImplementedError
