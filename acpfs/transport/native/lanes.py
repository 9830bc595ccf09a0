"""How the bytes of an open file travel: what an OPEN reply asks of the kernel.

Translates the lane that the file system chose into flags that this kernel understands, and chooses none itself. Any thread.
"""

from __future__ import annotations

import os

from acpfs.filesystem.records import OpenFile
from acpfs.transport.native.negotiate import Negotiated
from acpfs.transport.native.protocol import InitFlag, OpenFlag

_KEEP_CACHE = int(OpenFlag.KEEP_CACHE)
_DIRECT = int(OpenFlag.DIRECT_IO | OpenFlag.PARALLEL_DIRECT_WRITES)


class Lanes:
    """Lane → open flags."""

    def __init__(self, negotiated: Negotiated) -> None:
        self._direct_mmap = negotiated.has(InitFlag.DIRECT_IO_ALLOW_MMAP)

    def open_reply(self, flags: int, file: OpenFile) -> tuple[int, int]:
        """(open flags, backing id) for a file opened with `flags`.

        Kernels before 6.6 refuse shared mappings of files opened with direct I/O (ENODEV, seen with safetensors): there only
        files that cannot be mapped at all, those opened O_WRONLY, are direct.
        """
        if self._direct_mmap or flags & os.O_ACCMODE == os.O_WRONLY:
            return _DIRECT, 0
        return (_KEEP_CACHE if file.keep_cache else 0), 0
