"""`gasp.json`: what a gasp has, who wrote it, and checksums to compare it with. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from acpfs.checksum import Checksum
from acpfs.errors import AcpfsError, ExitCode
from acpfs.training.messages import GASP_VERSION, Manifest, SavedFile
from acpfs.training.records import (
    MalformedError,
    NewerError,
    from_json,
    refuse_newer,
    to_json,
)

NAME = "gasp.json"
_BLOCK_BYTES = 1 << 20


class GaspError(AcpfsError):
    """A directory is not what its manifest says; the message names the file."""


class NewerGaspError(GaspError):
    """A newer acpfs wrote it: no sign that there is nothing to go on from."""

    exit_code = ExitCode.REFUSED


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write it whole or not at all."""
    temporary = directory / f".{NAME}.tmp"
    temporary.write_text(json.dumps(to_json(manifest), indent=1) + "\n", encoding="ascii")
    temporary.replace(directory / NAME)


def read_manifest(directory: Path) -> Manifest | None:
    """What a directory says of itself; None where it is no gasp.

    Raises:
        NewerGaspError: it was written by a newer acpfs.
        GaspError: it says something that makes no sense.
    """
    try:
        data = json.loads((directory / NAME).read_bytes())
        if isinstance(data, dict):
            refuse_newer(
                str(directory / NAME), data, GASP_VERSION, "go on from it with the newer acpfs"
            )
        return from_json(Manifest, data)
    except NewerError as error:
        raise NewerGaspError(str(error)) from error
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, MalformedError) as error:
        raise GaspError(f"{directory / NAME}: {error}") from error


def saved_file(directory: Path, path: Path) -> SavedFile:
    """What to report of a file that was written."""
    digest = Checksum()
    size = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return SavedFile(path.relative_to(directory).as_posix(), size, digest.hexdigest())


def files_in(directory: Path) -> dict[str, int]:
    """Path → size of all that belongs to a gasp, without the manifest."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return {
        name: path.stat().st_size
        for path in found
        if (name := path.relative_to(directory).as_posix()) not in (NAME, f".{NAME}.tmp")
    }


def differences(directory: Path, files: Iterable[SavedFile]) -> list[str]:
    """What a directory has otherwise than reported; by names and sizes."""
    reported = {file.path: file.size for file in files}
    there = files_in(directory)
    missing = [f"{path} is missing" for path in sorted(reported.keys() - there.keys())]
    strange = [f"{path} was reported by nobody" for path in sorted(there.keys() - reported.keys())]
    sizes = [(path, there[path], reported[path]) for path in sorted(reported.keys() & there.keys())]
    return (
        missing
        + strange
        + [
            f"{path} has {found} bytes instead of {said}"
            for path, found, said in sizes
            if found != said
        ]
    )


def verify(directory: Path) -> Manifest:
    """Read a gasp and compare it with its manifest, checksums included.

    Raises:
        GaspError: it has none, or something differs.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        raise GaspError(f"{directory} has no {NAME}")
    if wrong := differences(directory, manifest.files):
        raise GaspError(f"{directory}: {'; '.join(wrong)}")
    for file in manifest.files:
        if saved_file(directory, directory / file.path) != file:
            raise GaspError(f"{directory / file.path} has another checksum than its manifest says")
    return manifest
