"""The checksum of a file's content: xxh3-128, as 32 lower-case hex digits, which is what
`xxh128sum` prints.

Whatever is recorded of contents, noted at files or compared with either is made here. Others hash
names and records as they like. Threading: an object belongs to one thread; hashing lets others run.
"""

from __future__ import annotations

from collections.abc import Callable

import xxhash

Checksum = xxhash.xxh3_128

_ZEROS = memoryview(bytes(1 << 20))


def hash_zeros(checksum: Checksum, count: int) -> None:
    """What a hole adds to a checksum."""
    while count:
        step = min(count, len(_ZEROS))
        checksum.update(_ZEROS[:step])
        count -= step


def of_reads(
    read: Callable[[memoryview, int], int],
    buffer: memoryview,
    size: int | None = None,
    *,
    before: Callable[[int], None] = lambda _count: None,
    passed: Callable[[int], None] = lambda _count: None,
) -> tuple[str, int]:
    """(checksum, bytes) of what `read(piece, position)` brings, up to its first 0 or to `size`.

    `before` each read: how many bytes are wanted; `passed` after it: how many came.
    """
    checksum = Checksum()
    position = 0
    while size is None or position < size:
        piece = buffer if size is None else buffer[: size - position]
        before(len(piece))
        count = read(piece, position)
        if not count:
            break
        checksum.update(piece[:count])
        position += count
        passed(count)
    return checksum.hexdigest(), position
