"""What the backing file system can do, tried out at mount (signatures first; being filled)."""

from __future__ import annotations

from dataclasses import dataclass

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import Features


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Outcome of `probe`."""

    features: Features
    notes: tuple[str, ...]
    """One sentence per thing that the backing file system lacks, for `status`."""


def probe(directory: BackingDirectory) -> ProbeReport:
    """Try everything in this node's staging directory and adapt `directory` to the outcome.

    Raises:
        MachineError: a file cannot be made, written, flushed and renamed there.
    """
    raise NotImplementedError
