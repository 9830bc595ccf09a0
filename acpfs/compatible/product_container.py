r"""The product's own file format, read: checkpoints that were saved before acpfs.

    records …  record map (pickle)  start, size of the map (two little-endian uint64)  "mindio\0"

The map names records as torch's own zip has them (`data.pkl`, `data/0` …), with their place; or
says that the file is plain bytes. Nothing that is in a file is carried out here: the map may hold
numbers, texts, tuples and dictionaries only. No torch.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from acpfs.compatible.refusal import UnsupportedError
from acpfs.errors import AcpfsError

MARK = b"mindio\0"
LATER_MARK = b"accacp"
_TAIL = struct.Struct("<QQ7s")
MAP_BYTES_MAX = 1 << 30
ALIGNMENT = 64
"""Of records in torch's zip, so that they can be mapped."""
COPY_BYTES = 16 << 20


class ContainerError(AcpfsError):
    """A file that ends as a container does, and is none."""


@dataclass(frozen=True, slots=True)
class Container:
    """Where the records of a file lie."""

    records: Mapping[str, tuple[int, int]]
    """Name → start, size; empty where it is plain bytes."""
    plain_size: int | None
    """Bytes from the file's start, where they are all."""


class _OnlyData(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise ContainerError(f"the record map names {module}.{name}, and may hold plain data only")


def read_container(file: IO[bytes]) -> Container | None:
    """What a file holds; None where it is none of the product's.

    Raises:
        ContainerError: it ends like one, and makes no sense.
        UnsupportedError: it is of a later kind.
    """
    size = file.seek(0, os.SEEK_END)
    if size < _TAIL.size:
        return None
    file.seek(size - _TAIL.size)
    tail = file.read(_TAIL.size)
    if tail.endswith(LATER_MARK):
        raise UnsupportedError(
            "a container that ends in `accacp` is of a kind that is not documented: convert it "
            "with the product itself"
        )
    start, length, mark = _TAIL.unpack(tail)
    if mark != MARK:
        return None
    if length > MAP_BYTES_MAX or start + length > size - _TAIL.size:
        raise ContainerError(
            f"the record map is said to be at {start}, {length} bytes long, in a file of {size} "
            "bytes"
        )
    file.seek(start)
    try:
        return _container(_OnlyData(io.BytesIO(file.read(length))).load(), start)
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
    ) as error:
        raise ContainerError(f"the record map cannot be read: {error}") from error


def _container(found: Any, end: int) -> Container:
    if found.get("mindio_save_data_type") == "directly_bytes":
        return Container({}, _within(0, int(found["bytes_length"]), end)[1])
    records = {
        str(name): _within(int(start), int(size), end) for name, (start, size) in found.items()
    }
    if "data.pkl" not in records or any(
        name.startswith("/") or ".." in name.split("/") for name in records
    ):
        raise ValueError(f"no checkpoint has records {', '.join(sorted(records)[:5])}")
    return Container(records, None)


def _within(start: int, size: int, end: int) -> tuple[int, int]:
    if start < 0 or size < 0 or start + size > end:
        raise ValueError(f"a record at {start} of {size} bytes, beyond {end}")
    return start, size


def rewrite(source: IO[bytes], container: Container, target: IO[bytes]) -> None:
    """Write what `torch.load` reads: a zip of the same records, or the plain bytes."""
    if container.plain_size is not None:
        source.seek(0)
        _copy(source, target, container.plain_size)
        return
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, (start, size) in container.records.items():
            source.seek(start)
            _add(archive, name, source, size)
        for name, text in (("version", b"3\n"), ("byteorder", b"little")):
            if name not in container.records:
                _add(archive, name, io.BytesIO(text), len(text))


def _add(archive: zipfile.ZipFile, name: str, source: IO[bytes], size: int) -> None:
    entry = zipfile.ZipInfo(f"archive/{name}")
    entry.file_size = size
    assert archive.fp is not None
    large = size * 1.05 > zipfile.ZIP64_LIMIT
    before = archive.fp.tell() + 30 + len(entry.filename) + (20 if large else 0) + 4
    padding = -before % ALIGNMENT
    entry.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(entry, "w", force_zip64=large) as record:
        _copy(source, record, size)


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> None:
    while size > 0:
        data = source.read(min(size, COPY_BYTES))
        if not data:
            raise ContainerError("the file ends in the middle of a record")
        target.write(data)
        size -= len(data)


def convert(source: Path, target: Path) -> None:
    """Write `target` as a plain torch file; it has its name only when it is whole.

    Raises:
        ContainerError: the source is none of the product's, or damaged.
        UnsupportedError: it is of a later kind.
        OSError: it cannot be read, or the target cannot be written.
    """
    if source.resolve() == target.resolve():
        raise ContainerError(f"{source}: source and target are the same file")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with source.open("rb") as file:
        container = read_container(file)
        if container is None:
            raise ContainerError(
                f"{source} is not of the product's format: torch.load reads it as it is, if it "
                "is a torch file"
            )
        try:
            with temporary.open("xb") as made:
                rewrite(file, container, made)
            shutil.copymode(source, temporary)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
