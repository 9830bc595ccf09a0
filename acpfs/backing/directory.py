"""The backing directory by descriptor (signatures first; being filled)."""

from __future__ import annotations

from pathlib import Path

from acpfs.backing.lower import Features


class BackingDirectory:
    """Implements `Lower`; see there."""

    def __init__(self, path: Path, node_id: str) -> None:
        """Open it and make `.acpfs/…`.

        Raises:
            MachineError: missing, not a directory, not writable.
        """

    @property
    def features(self) -> Features:
        """As probed; all good before `adapt`."""
        raise NotImplementedError

    def adapt(self, features: Features) -> None:
        """Take over what `backing.probe` found."""

    def calls(self) -> dict[str, int]:
        """How many system calls of each kind were made on the backing directory so far."""
        raise NotImplementedError

    def disconnect(self) -> None:
        """Close the descriptor; nothing else may be called afterwards."""
