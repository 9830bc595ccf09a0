"""Files that have their name only when they are whole, as the product's `create_file` and
`open_file` hand them out.

MindSpore writes the final name through these, and renames nothing by itself. A temporary name in
the same directory is renamed at `close`; an exception inside `with` drops it, and whatever had the
name stays.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from types import TracebackType


class WriteableFile:
    """A file that is being written. Belongs to one thread at a time."""

    def __init__(self, path: str, mode: int = 0o600) -> None:
        """`mode`: permissions of a new file, less the process's mask.

        Raises:
            OSError: it cannot be made.
        """
        self._path = os.path.abspath(os.fspath(path))
        directory, name = os.path.split(self._path)
        self._temporary = os.path.join(directory, f".{name}.{secrets.token_hex(4)}.tmp")
        self._file = os.fdopen(
            os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode),
            "wb",
        )
        self._open = True

    def write(self, data: bytes) -> int:
        """Append; how many bytes.

        Raises:
            OSError: it cannot be written; the name will not be there.
            ValueError: the file is closed.
        """
        try:
            return self._file.write(data)
        except OSError:
            self.drop()
            raise

    def drop(self) -> int:
        """Give it up: the name stays what it was. 0."""
        if self._open:
            self._open = False
            with contextlib.suppress(OSError):  # what could not be written is given up as well
                self._file.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary)
        return 0

    def close(self) -> int:
        """It is whole: it gets its name. 0.

        Raises:
            OSError: some of it could not be written, or renamed; the name is not there.
        """
        if not self._open:
            return 0
        try:
            self._file.close()
            os.replace(self._temporary, self._path)
        except OSError:
            self.drop()
            raise
        self._open = False
        return 0

    def __enter__(self) -> WriteableFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.drop()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.drop()


class ReadableFile:
    """A file that is read at places that the caller names."""

    def __init__(self, path: str) -> None:
        """Open it.

        Raises:
            OSError: it cannot be opened.
        """
        self._file = open(path, "rb")  # noqa: SIM115  # closed by `close`

    def read(self, offset: int = 0, count: int = -1) -> bytes:
        """Bytes from `offset` on; `count` -1: to the end.

        Raises:
            ValueError: they are not all there.
        """
        size = os.fstat(self._file.fileno()).st_size
        wanted = size - offset if count == -1 else count
        if offset < 0 or wanted < 0 or offset + wanted > size:
            raise ValueError(f"{count} bytes from {offset} on, of a file of {size}")
        self._file.seek(offset)
        data = self._file.read(wanted)
        if len(data) < wanted:
            raise ValueError(f"the file was cut to {offset + len(data)} bytes while it was read")
        return data

    def close(self) -> int:
        """0."""
        self._file.close()
        return 0

    def __enter__(self) -> ReadableFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
