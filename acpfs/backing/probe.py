"""What the backing file system can do, tried out at mount in this node's staging directory.

The mount's own semantics do not depend on the outcome; it says how to reach them, and what `status`
tells. What is tried is in `quirks`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerPath
from acpfs.backing.quirks import Features, Trial, found_features, what_is_lacking
from acpfs.backing.syscalls import Opener
from acpfs.errors import MachineError

NO_OPENAT2 = "no openat2 on this machine: paths are walked component by component"


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Outcome of `probe`."""

    features: Features
    notes: tuple[str, ...]
    """One sentence per thing that the backing file system lacks, for `status`."""


def probe(directory: BackingDirectory) -> ProbeReport:
    """Try everything and adapt `directory` to the outcome.

    Raises:
        MachineError: a file cannot be made, written, flushed and renamed there.
    """
    try:
        with _trial(directory) as trial:
            features = found_features(trial)
    except OSError as error:
        raise MachineError(
            f"backing directory {directory.path} cannot be written to: {error.strerror}"
        ) from error
    directory.adapt(features)
    return ProbeReport(
        features, (*what_is_lacking(features), *([] if Opener(0).uses_openat2 else [NO_OPENAT2]))
    )


@contextlib.contextmanager
def _trial(directory: BackingDirectory) -> Iterator[Trial]:
    """A staging file that was written, flushed and renamed, which cannot be done without; whatever
    was made is removed at the end.
    """
    path = directory.staging_directory()
    name = f"probe-{directory.chance.token(6)}"
    with contextlib.ExitStack() as undo:
        file_fd = directory.create_staging(name)
        undo.callback(os.close, file_fd)
        trial = Trial(
            directory.descriptor,
            _opened(directory, path),
            file_fd,
            name.encode(),
            name.encode() + b"-a",
        )
        undo.callback(os.close, trial.dir_fd)
        moved = trial.name + b"-moved"
        undo.callback(_remove, trial.dir_fd, (trial.name, trial.other, moved))
        os.write(file_fd, b"acpfs")
        os.fsync(file_fd)
        os.rename(trial.name, moved, src_dir_fd=trial.dir_fd, dst_dir_fd=trial.dir_fd)
        os.rename(moved, trial.name, src_dir_fd=trial.dir_fd, dst_dir_fd=trial.dir_fd)
        yield trial


def _opened(directory: BackingDirectory, path: LowerPath) -> int:
    root_fd = os.open(directory.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return Opener(root_fd).open(path, os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(root_fd)


def _remove(dir_fd: int, names: tuple[bytes, ...]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=dir_fd)
