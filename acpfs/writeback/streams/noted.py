"""The checksum note of a file goes with its times.

The note holds for one mtime, so that a file which others have written to is not taken for a damaged
one. A program that sets the time of a file that is persisted already has not changed its bytes: the
note has to follow, or the checksum is never compared again. Called in the commit thread.
"""

from __future__ import annotations

import stat

from acpfs.backing.attributes import DIGEST_XATTR
from acpfs.backing.lower import Lower, LowerPath, Note
from acpfs.writeback.log.ops import Metadata


def with_note(lower: Lower, path: LowerPath, meta: Metadata, *, doubtful: bool) -> Metadata:
    """`meta`, and with it the note that holds afterwards, if the one there holds now.

    `doubtful`: this may have been carried out in part; the note is given first, so one for the new
    time held when it was given.
    """
    if meta.mtime_ns is None or not lower.features.xattrs:
        return meta
    st = lower.lstat(path)
    note = lower.note(path) if stat.S_ISREG(st.mode) else None
    if note is None:
        return meta
    granularity_ns = lower.features.time_granularity_ns
    given_before = doubtful and note.mtime_ns == meta.mtime_ns
    if note.is_about(st, granularity_ns) or given_before:
        after = Note(note.digest, meta.mtime_ns)
    elif note.mtime_ns // granularity_ns == meta.mtime_ns // granularity_ns:
        after = Note(
            note.digest
        )  # others wrote to the file since: it must not come to hold for their bytes
    else:
        return meta
    noted = Metadata.from_json(meta.to_json())
    noted.xattrs[DIGEST_XATTR] = after.encode()
    return noted
