"""That no directory above the backing directory is one in use, too: between the two there would be no order.

A member of the one knows nothing of members of the other. So a pointer that is committed by way of the outer one does not wait for shards
that are closed in the inner one, and neither guard sees the other's checkpoints. Only directories that this process can see are looked at:
of a part that a container was given nothing above is. Changes nothing; may block as long as one of them hangs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

ENDED = frozenset({"left", "gone"})
"""States of a record whose member has nothing to persist any more."""


def volume_above(backing: Path) -> tuple[Path, list[str]] | None:
    """The nearest directory above that has members which did not end in order, and those; None: there is none."""
    for directory in Path(os.path.realpath(backing)).parents:
        if os.path.isfile(directory / ".acpfs/volume"):  # False, too, where it may not be looked at
            members = [
                record.name
                for record in sorted((directory / ".acpfs/nodes").glob("[!.]*"))
                if not _has_ended(record)
            ]
            if members:
                return directory, members
    return None


def _has_ended(record: Path) -> bool:
    """What cannot be read has not, as far as anybody can tell."""
    try:
        found = json.loads(record.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("state") in ENDED
