"""That no directory above the backing directory is one in use, too: between the two there would be
no order.

A member of the one knows nothing of members of the other. So a pointer that is committed by way of
the outer one does not wait for shards that are closed in the inner one, and neither guard sees the
other's checkpoints. What is above is no matter of paths: a bind mount of a part, or a mount of
acpfs, shows a directory of which the mount table says where it lies. Only directories that this
process can see are looked at: of a part that a container was given nothing above is. Changes
nothing; may block as long as one of them hangs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from acpfs.mounting.mountpoint import KIND
from acpfs.ram.mounts import MountEntry, mount_of, mount_table

ENDED = frozenset({"left", "gone"})
"""States of a record whose member has nothing to persist any more."""


def volume_above(backing: Path) -> tuple[Path, list[str]] | None:
    """The nearest directory above that has members which did not end in order, and those; None:
    there is none.
    """
    for directory in _above(os.path.realpath(backing)):
        if os.path.isfile(directory / ".acpfs/volume"):  # False, too, where it may not be looked at
            members = [
                record.name
                for record in sorted((directory / ".acpfs/nodes").glob("[!.]*"))
                if not _has_ended(record)
            ]
            if members:
                return directory, members
    return None


def _above(path: str) -> Iterator[Path]:
    """What is above a directory, nearest first, by its path and by each other that it has."""
    yield from Path(path).parents
    table = mount_table()
    seen = {path}
    to_look_at = [path]
    while to_look_at:
        for name in _other_names(to_look_at.pop(), table):
            if name not in seen:
                seen.add(name)
                to_look_at.append(name)
                yield from Path(name).parents


def _other_names(path: str, table: list[MountEntry]) -> Iterator[str]:
    """By which other paths the same directory is seen here.

    By the table alone: none of them is touched.
    """
    own = mount_of(path)
    if own is None:
        return
    inside = _joined(own.root, path[len(own.path.rstrip("/")) :])
    if own.kind == KIND:  # what it shows lies in its backing directory, which is its source
        yield _joined(own.source, inside)
    for other in table:
        if other.device != own.device or not _joined(inside, "/").startswith(
            _joined(other.root, "/")
        ):
            continue
        name = _joined(other.path, inside[len(other.root.rstrip("/")) :])
        shown_by = mount_of(name)
        if shown_by is not None and shown_by.number == other.number:
            yield name  # else another mount lies over it, and that may be anything


def _joined(directory: str, below: str) -> str:
    return directory.rstrip("/") + "/" + below.lstrip("/") if below else directory


def _has_ended(record: Path) -> bool:
    """What cannot be read has not, as far as anybody can tell."""
    try:
        found = json.loads(record.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("state") in ENDED
