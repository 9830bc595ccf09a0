"""Names in the directory of checkpoints: the tracker, and names that are taken. No torch.

A name is no identity: what lies there may be a symbolic link, or have a second name, so that
writing through it would change something else, such as the checkpoint that a script's own `latest`
leads to. Written in place is only a small regular file of one link; anything else is replaced by a
rename, and what would be lost with that is kept beside.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from acpfs import client
from acpfs.errors import NotMountedError
from acpfs.logger import get_logger
from acpfs.training import mounted
from acpfs.training.manifest import NAME as MANIFEST
from acpfs.training.manifest import GaspError
from acpfs.training.messages import Manifest

log = get_logger(__name__)
TRACKER_BYTES_MAX = 4096
"""As long as a path may be. What is longer is no tracker, but somebody's file."""
TRACKER_URGENT_S = 60.0


def begun(manifest: Manifest) -> str:
    """What the names have in common of all that this job begins to write, and no other job."""
    return f".gasp-{manifest.job}"


def keep_beside(path: Path, manifest: Manifest) -> None:
    """What has this name gets a free one: `NAME.before-gasp-GENERATION`, or a number behind it."""
    if not os.path.lexists(path):
        return
    first = f"{path.name}.before-gasp-{manifest.generation}"
    kept = path.with_name(first)
    number = 1
    while os.path.lexists(kept):  # of an earlier job: a rename would replace it, or fail
        number += 1
        kept = path.with_name(f"{first}-{number}")
    log.warning("the name is taken; what has it is kept beside", name=path.name, kept=kept.name)
    if not path.is_symlink():  # an attribute would be set on what it leads to
        mounted.set_needs(path, mounted.needed(manifest.nodes))
    path.rename(kept)


def write_tracker(path: Path, text: str, manifest: Manifest) -> None:
    """Write it, or write it again: whole at every moment.

    Nor does it come behind an older one that is withheld for a node that died: one that is there is
    written in place, in one write and without being cut off first. Without a mount it is replaced.
    """
    data = text.encode()
    nodes = mounted.needed(manifest.nodes)
    if _lies_in_mount(path):
        # a file that may not be written may have its name taken: that is the directory's to allow
        with suppress(FileNotFoundError, PermissionError), _opened_in_place(path) as file:
            if _is_plain(os.fstat(file.fileno())):
                _write(file, path, data, nodes)
                return
    temporary = path.with_name(f".{path.name}{begun(manifest)}-{manifest.generation}.tmp")
    temporary.unlink(missing_ok=True)  # of an attempt that was killed
    with temporary.open("xb", buffering=0) as file:
        _write(file, temporary, data, nodes)
    if _would_be_lost(path):
        keep_beside(path, manifest)
    temporary.replace(path)


def read_tracker(path: Path) -> Path:
    """The checkpoint that it names, or that it leads to where it is a link or a directory.

    Raises:
        GaspError: it is there, and is no tracker.
        OSError: it cannot be read; FileNotFoundError: there is none.
    """
    if path.is_symlink() or path.is_dir():
        return path.parent / os.readlink(path) if path.is_symlink() else path
    with path.open("rb") as file:
        data = file.read(TRACKER_BYTES_MAX + 1)
    try:
        name = data.decode().strip()
    except UnicodeDecodeError:
        name = ""
    if not name or "\0" in name or len(data) > TRACKER_BYTES_MAX:
        raise GaspError(f"{path} names no checkpoint")
    return path.parent / name


def remove_begun(directory: Path, begun: str, generation: int, keep: str) -> None:
    """What a job has begun to write up to this generation, and has not named, goes.

    It takes the room of what comes. Nobody writes there any more but in vain: who hangs in an older
    generation, and was about to give the name, could still do so. Without the manifest, which goes
    first, that would be no checkpoint to anybody. `begun`: what their names have in common.
    """
    left = re.compile(".*" + re.escape(begun) + r"-(\d+)\.tmp")
    with suppress(OSError):  # the mount may be full or gone for a moment: the next one removes them
        for path in directory.iterdir():
            found = left.fullmatch(path.name)
            if found is None or int(found[1]) > generation or path.name == keep:
                continue
            log.warning("what a fault broke off is removed", path=str(path))
            if path.is_dir():
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _lies_in_mount(path: Path) -> bool:
    try:
        client.node_id(path.parent)
    except NotMountedError:
        return False
    return True


def _opened_in_place(path: Path) -> BinaryIO:
    """Not through a link, and without waiting for who reads a pipe.

    Raises:
        FileNotFoundError: nothing that could be written in place.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise FileNotFoundError(path)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags), "r+b", buffering=0)


def _is_plain(found: os.stat_result) -> bool:
    """Asked of the open file: whatever has its name by now, this is what is written."""
    is_single = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
    return is_single and found.st_size <= TRACKER_BYTES_MAX


def _write(file: BinaryIO, path: Path, data: bytes, nodes: tuple[str, ...]) -> None:
    # urgent by itself: other files of the job, which may be what RAM is full of, go on to wait
    mounted.declare_urgent(path, TRACKER_URGENT_S)
    file.write(data.ljust(os.fstat(file.fileno()).st_size, b"\n"))
    file.truncate(len(data))
    mounted.set_needs(path, nodes)
    mounted.withdraw_urgent(path)


def _would_be_lost(path: Path) -> bool:
    """Whether a rename to this name would end what has it, or fail.

    Not so of a link to something, of a tracker, and of a file that has another name, too.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if stat.S_ISREG(found.st_mode):
        return found.st_nlink == 1 and found.st_size > TRACKER_BYTES_MAX
    return not stat.S_ISLNK(found.st_mode)
