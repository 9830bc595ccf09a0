"""Does a storage refuse calls that come late through a removed directory? On that rests the fence
around earlier terms (`backing.terms`).

Tried in a directory of its own below `.acpfs`, which is gone at the end. Blocks as the backing
directory does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from acpfs.runtime.chance import Chance

NOTED_AT = b"late-calls"
"""Below `.acpfs`: what was found, for whoever would adopt a log there (`note`)."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_REFUSED = frozenset({errno.ENOENT, errno.ESTALE})


@dataclass(frozen=True, slots=True)
class LateCalls:
    """What became of each."""

    carried_out: tuple[str, ...]
    """What the storage did all the same, in words."""
    unclear: tuple[str, ...]
    """What failed, but not as it does where the directory is gone."""

    @property
    def are_refused(self) -> bool:
        """Whether the fence holds there."""
        return not (self.carried_out or self.unclear)


def try_late_calls(first: Path, second: Path, chance: Chance) -> LateCalls:
    """Have calls come late to `first`, after the fence was made in `second`: the same backing
    directory, perhaps through another mount of it.

    Raises:
        OSError: it cannot be tried; ENOTDIR with a sentence where `second` shows something else.
    """
    name = f"late-{chance.token(8)}"
    with _place(first / ".acpfs", name) as here:
        there = second / ".acpfs" / name
        (here / "earlier").mkdir()
        for file, content in (("earlier/staged", b"new"), ("target", b"old"), ("other", b"other")):
            _write(here / file, content)
        if not _is_same(here / "target", there / "target"):
            raise OSError(errno.ENOTDIR, f"{second} is no other mount of {first}")
        with _opened(here) as top, _opened(here / "earlier") as earlier:
            os.stat(
                "staged", dir_fd=earlier, follow_symlinks=False
            )  # by now a client has in its caches what it can have
            _fence(there)
            answers = {
                "a store": _answer(
                    lambda: os.rename("staged", "target", src_dir_fd=earlier, dst_dir_fd=top)
                ),
                "a removal": _answer(
                    lambda: os.rename("other", "gone", src_dir_fd=top, dst_dir_fd=earlier)
                ),
                "a new file": _answer(lambda: _create(earlier)),
            }
        # What a client says is one thing; what the other one finds is another.
        if (there / "target").read_bytes() != b"old":
            answers["a store"] = 0
        if not (there / "other").exists():
            answers["a removal"] = 0
    return LateCalls(
        tuple(call for call, number in answers.items() if not number),
        tuple(
            f"{call} ({errno.errorcode.get(number, number)})"
            for call, number in answers.items()
            if number and number not in _REFUSED
        ),
    )


class Storage(NamedTuple):
    """Which one it is, and how it is reached: what was found through an ext4 of the server says
    nothing of its clients, and what was found of one storage nothing of a copy of it.
    """

    kind: str
    """Of file system, as the mount table has it."""
    fsid: int
    """As statvfs says it; 0 where it says nothing."""
    number: int
    """Inode of `.acpfs`: a copy of the storage has another one."""


def storage_at(top_fd: int, kind: str) -> Storage:
    """`top_fd`: of the backing directory; `kind`: what the mount table says of that.

    Raises:
        OSError: the storage's.
    """
    number = os.stat(".acpfs", dir_fd=top_fd, follow_symlinks=False).st_ino
    return Storage(kind, os.fstatvfs(top_fd).f_fsid, number)


def note(backing: Path, storage: Storage, found: LateCalls, at: float) -> None:
    """Have members know it. `at`: wall clock.

    Raises:
        OSError: it cannot be written.
    """
    place = backing / ".acpfs" / os.fsdecode(NOTED_AT)
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    said = {"refused": found.are_refused, "at": at, "storage": list(storage)}
    temporary.unlink(missing_ok=True)  # of one that was killed
    _write(temporary, json.dumps(said).encode() + b"\n")
    temporary.rename(place)


def is_refusal_noted(text: bytes, storage: Storage) -> bool:
    """Whether a note says that late calls are refused, of this very storage, reached in the same
    way; what cannot be read says nothing.
    """
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found.get("refused") is True and found.get("storage") == list(storage)
    return False


def _fence(there: Path) -> None:
    (there / "later").mkdir()
    os.rename(there / "earlier/staged", there / "later/staged")
    os.rmdir(there / "earlier")


def _create(dir_fd: int) -> None:
    os.close(os.open("late", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, dir_fd=dir_fd))


def _answer(call: Callable[[], object]) -> int:
    """0, or its errno."""
    try:
        call()
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _write(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _is_same(here: Path, there: Path) -> bool:
    with contextlib.suppress(OSError):
        return there.read_bytes() == here.read_bytes()
    return False


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, _DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _place(own: Path, name: str) -> Iterator[Path]:
    own.mkdir(mode=0o755, exist_ok=True)
    (own / name).mkdir(mode=0o700)
    try:
        yield own / name
    finally:
        shutil.rmtree(own / name, ignore_errors=True)
