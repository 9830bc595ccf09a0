"""Which modules call the machine on descriptors of the storage past `Lower`, and why.

A double of `Lower` serves those that a simulated history comes to (`tests/sim/virtual.py`); where
tests give it a real directory, no fault of theirs is judged. Only shorter from here.
"""

from __future__ import annotations

PAST_LOWER: dict[str, tuple[tuple[str, ...], str]] = {
    "filesystem/content/fill.py": (
        ("dup",),
        "a descriptor for who begins another fill of the file; nothing is asked of the storage",
    ),
    "filesystem/content/outgrown.py": (
        ("close", "dup", "fdatasync", "ftruncate", "pread"),
        "pieces go from RAM to a staging file and back, and one loop reads both alike",
    ),
    "filesystem/content/overflow.py": (
        ("close", "ftruncate", "pread"),
        "a file that has its bytes in a staging file is changed as one in RAM is, by one function",
    ),
    "filesystem/content/warming.py": (
        ("close", "dup", "ftruncate"),
        "a descriptor of its own for each thread; the copy goes to RAM",
    ),
    "filesystem/content/whole_reads.py": (
        ("dup", "posix_fadvise", "pread", "pwrite"),
        "reads what a deleted file had by a copy of its descriptor; writes to RAM, or beside it",
    ),
    "filesystem/lower_reads.py": (
        ("fstat", "pread"),
        "each read(2) of a cold file: a call through `Lower` fills a buffer that is copied then",
    ),
    "filesystem/nameless.py": (("dup",), "a descriptor for each reader; nothing is asked"),
    "filesystem/preloading.py": (("pread",), "reads a small file whole, as bytes"),
}
"""Module → its calls, and the reason."""
OF_OTHERS = {
    "filesystem/content/body.py": "RAM",
    "filesystem/content/contents.py": "RAM",
    "filesystem/copy_range.py": "RAM",
    "filesystem/files.py": "RAM",
    "filesystem/kernel_writes.py": "RAM",
    "filesystem/last_close.py": "a pidfd",
    "filesystem/pages_ahead.py": "RAM",
    "filesystem/salvage.py": "a mark in the directory of the state",
    "filesystem/scrub.py": "RAM",
    "writeback/copies/copy_buffers.py": "memory",
    "writeback/copies/held_copies.py": "copies that other members gave",
    "writeback/copies/on_disk.py": "the spill directory",
    "writeback/copies/on_member.py": "copies that other members have",
    "writeback/copies/on_storage.py": "a temporary file of this machine",
    "writeback/sources/source.py": "RAM",
    "writeback/sources/spill.py": "the spill directory",
}
"""Modules that make such calls on none of the storage, and what theirs are of."""
