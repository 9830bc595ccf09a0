"""The mark of a node on the backing directory: which journal counts of what it has mirrored or had
copied, and where that is. Every call may hang with the backing directory.
"""

from __future__ import annotations

import contextlib
import json
import re

from acpfs.backing.leftovers import MIRRORS, WITHDRAWN
from acpfs.backing.lower import Lower, LowerPath

_TOKEN = re.compile(r"[\w-]*")
"""It becomes a part of names of files: whoever may write to the mark leads to no other place."""


def mark_path(node_id: str) -> LowerPath:
    """Below `.acpfs`: which journal of the node counts."""
    return (MIRRORS, node_id.encode())


def withdraw(lower: Lower, mark: LowerPath) -> None:
    """No journal counts from now on.

    Written, not only removed: a removal is not flushed, and a power failure could undo it.
    """
    with contextlib.suppress(FileNotFoundError):
        there = lower.read_own(mark)
        if there != WITHDRAWN:
            _replace(lower, mark, there, WITHDRAWN)


def put(lower: Lower, mark: LowerPath, content: bytes) -> None:
    """Another journal counts from now on."""
    there = b""
    with contextlib.suppress(FileNotFoundError):
        there = lower.read_own(mark)
    _replace(lower, mark, there, content)


def _replace(lower: Lower, mark: LowerPath, there: bytes, content: bytes) -> None:
    """A holder may adopt what an earlier mount had copied, though this one has no copies: its
    change of the mark comes before the fence, or is refused, as that of a mount with copies.
    """
    if b'"holder"' in there:
        lower.fence_own_files()
    lower.write_own(mark, content)


def read_mark(lower: Lower, node_id: str) -> dict[str, str] | None:
    """Which journal counts; None: none.

    Raises:
        ValueError: the mark is damaged.
        OSError: the backing directory's.
    """
    try:
        text = lower.read_own(mark_path(node_id))
    except FileNotFoundError:
        return None
    if text == WITHDRAWN:
        return None
    mark = json.loads(text)
    if not isinstance(mark, dict):
        raise ValueError(f"no object: {text[:40]!r}")  # noqa: TRY004 - of what lies there
    told = {name: value for name, value in mark.items() if isinstance(value, str)}
    if not _TOKEN.fullmatch(told.get("token", "")):
        raise ValueError(f"no token of a journal: {told['token'][:40]!r}")
    return told
