"""`acpfs salvage`: copies out of a RAM tier that no mount takes any more what is perhaps nowhere
else.

The state in the tier says which file is which. It is read from a copy, as far as it can be read;
files that it does not name are copied under their numbers. Nothing in the tier is changed, so this
can be done again. Refused while a mount uses the tier.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from acpfs.checksum import Checksum
from acpfs.control.runtime import places_to_look
from acpfs.errors import ConfigError, RefusedError
from acpfs.ram.migration import migrate
from acpfs.ram.place import DATA, STATE_FILE
from acpfs.ram.state import HELD_VERSION, lost
from acpfs.types import ROOT

NAMED = "files"
UNNAMED = "unnamed"
LIST = "salvaged.json"
PIECE_BYTES = 8 << 20
SHOWN_BYTES = 16


@dataclass(frozen=True, slots=True)
class TierFileRecord:
    """What the state says of a tier file."""

    name: bytes
    """Path, with what tells it from other versions of it."""
    size: int | None
    """How many of the first bytes; None: all."""
    digest: str
    order: int
    """The largest of one name is the newest."""
    note: str = ""
    """What its bytes lack, for all that is known."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What became of one tier file, or of one version in it."""

    number: int
    """Of the tier file, or of the version."""
    target: str | None
    """Below the target directory; null: not copied."""
    size: int
    checksum: str
    """xxh3-128 of what was copied."""
    begins: str
    """Its first bytes, to know it by."""
    problem: str
    """Why it may not be what was written; empty: it is."""


def salvage(tier: Path, target: Path, *, everything: bool = False) -> list[Saved]:
    """Copy to `target`, which must be empty or not there.

    `everything`: also what the backing directory has.

    Raises:
        ConfigError: there is no RAM tier, or the target has something in it.
        RefusedError: a mount uses the tier, or a newer acpfs wrote its state.
    """
    if not (tier / DATA).is_dir():
        raise ConfigError(f"{tier} is not a RAM tier: there is no directory {DATA} in it")
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise ConfigError(f"{target} is not empty")
    with _kept_out(tier):
        why, names = _names(tier, target, everything=everything)
        saved = []
        files = [path for path in (tier / DATA).iterdir() if not path.is_dir()]  # none of others
        for file in sorted(files, key=lambda path: (len(path.name), path.name)):
            if names is None or not file.name.isdigit() or int(file.name) not in names:
                saved.append(_copy_unnamed(file, target, why))
            else:
                saved += [
                    _copy_claimed(file, target, claim, why) for claim in names[int(file.name)]
                ]
    (target / LIST).write_text(json.dumps([asdict(one) for one in saved], indent=2) + "\n")
    return saved


@contextlib.contextmanager
def _kept_out(tier: Path) -> Iterator[None]:
    """No mount takes the tier meanwhile."""
    with contextlib.ExitStack() as stack:
        name = f"{tier.resolve().name}.lock"
        for lock in {
            tier.resolve().parent / name,
            *(place / "tiers" / name for place in places_to_look()),
        }:
            with contextlib.suppress(FileNotFoundError):
                stream = stack.enter_context(open(lock, "rb"))
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise RefusedError(f"{tier} is in use: read its files in the mount") from None
        yield


# -- the state


def _names(
    tier: Path, scratch: Path, *, everything: bool
) -> tuple[str, dict[int, list[TierFileRecord]] | None]:
    """What is wrong with the state, and what it says of tier files.

    One without claims is of a file that the backing directory has.
    """
    why = lost(tier / STATE_FILE, has_bytes=True)
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        copy = Path(directory) / STATE_FILE
        try:
            for name in (STATE_FILE, f"{STATE_FILE}-wal"):
                if (tier / name).exists():
                    shutil.copy(tier / name, copy.with_name(name))
            with contextlib.closing(sqlite3.connect(copy)) as db:
                damage = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
                migrate(db, HELD_VERSION, tier)
                why = why or ("" if damage == "ok" else damage)
                return why, _claims(db, everything=everything or bool(why))
        except (OSError, sqlite3.Error, ValueError, TypeError) as error:
            return why or str(error), None


def _claims(db: sqlite3.Connection, *, everything: bool) -> dict[int, list[TierFileRecord]]:
    """A state that is damaged is not believed that the backing directory has a file: then
    `everything`.
    """
    parents = {
        ino: (parent, bytes(name))
        for parent, name, ino in db.execute("SELECT parent, name, ino FROM child WHERE ino > 0")
    }
    found: dict[int, list[TierFileRecord]] = {}
    versions = (
        "SELECT op.ino, op.parent, op.name, vid, tier_id, size, digest FROM op JOIN version "
        "USING (vid)"
    )
    for ino, parent, name, vid, tier_id, size, digest in db.execute(versions):
        path = _path(ino, parents) or _path(ino, {**parents, ino: (parent, bytes(name))})
        if path and tier_id:
            found.setdefault(tier_id, []).append(TierFileRecord(path, size, digest, vid))
    contents = (
        "SELECT ino, tier_id, modified, identity, staging FROM node WHERE tier_id > 0 AND head = 0"
    )
    for ino, tier_id, modified, identity, staging in db.execute(contents):
        path = _path(ino, parents)
        note = ""
        if staging:
            note = f"a part of it is in the staging file {staging} on the backing directory"
        if not path:
            continue
        claims = found.setdefault(tier_id, [])
        if modified:
            claims.append(TierFileRecord(path + b".being-written", None, "", 0, note))
        elif not claims and (everything or not identity):
            claims.append(TierFileRecord(path, None, "", 0, note))
    if not everything:  # else they are copied, too: without a name, for they are only parts
        for (tier_id,) in db.execute("SELECT tier_id FROM node WHERE head > 0"):
            found.setdefault(tier_id, [])
    return _told_apart(found)


def _told_apart(found: dict[int, list[TierFileRecord]]) -> dict[int, list[TierFileRecord]]:
    """Of several versions of one file the newest has its name."""
    newest: dict[bytes, int] = {}
    for claim in (claim for claims in found.values() for claim in claims):
        newest[claim.name] = max(newest.get(claim.name, 0), claim.order)

    def named(claim: TierFileRecord) -> TierFileRecord:
        older = claim.order < newest[claim.name]
        return replace(claim, name=claim.name + b".version-%d" % claim.order) if older else claim

    return {number: [named(claim) for claim in claims] for number, claims in found.items()}


def _path(ino: int, parents: dict[int, tuple[int, bytes]]) -> bytes:
    """Below the mount point; "" where the state does not say, or says what no file can be
    called.
    """
    names: list[bytes] = []
    while ino != ROOT:
        parent, name = parents.get(ino, (0, b""))
        if (
            not name
            or name in (b".", b"..")
            or b"/" in name
            or b"\0" in name
            or len(names) > len(parents)
        ):
            return b""
        ino = parent
        names.append(name)
    return b"/".join(reversed(names))


# -- the bytes


def _copy_claimed(file: Path, target: Path, claim: TierFileRecord, why: str) -> Saved:
    saved = _copied(file, target, Path(os.fsdecode(NAMED.encode() + b"/" + claim.name)), claim.size)
    if (
        saved.target is None
    ):  # a name that nothing can have there: too long, or a directory of another file
        other = _copied(file, target, Path(UNNAMED) / f"{file.name}-{claim.order}", claim.size)
        return replace(other, problem=f"{saved.problem} as {os.fsdecode(claim.name)}")
    problem = claim.note or (f"it is called so by a state that is damaged: {why}" if why else "")
    if claim.digest and claim.digest != saved.checksum:
        problem = f"its bytes are not those that were written, whose checksum is {claim.digest}"
    elif claim.size is not None and saved.size < claim.size:
        problem = f"only {saved.size} of its {claim.size} bytes are there"
    return replace(saved, problem=problem)


def _copy_unnamed(file: Path, target: Path, why: str) -> Saved:
    saved = _copied(file, target, Path(UNNAMED) / file.name, None)
    return replace(
        saved, problem=saved.problem or f"its name is not known{f': {why}' if why else ''}"
    )


def _copied(file: Path, target: Path, to: Path, size: int | None) -> Saved:
    """The first bytes of a tier file, and what is wrong with that."""
    number = int(file.name) if file.name.isdigit() else 0
    hasher = Checksum()
    begins = b""
    done = 0
    try:
        (target / to).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(
            target / to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        with os.fdopen(fd, "wb") as writer, open(file, "rb") as reader:
            while data := reader.read(
                PIECE_BYTES if size is None else min(PIECE_BYTES, size - done)
            ):
                hasher.update(data)
                begins = begins or data[:SHOWN_BYTES]
                done = done + len(data)
                if data.strip(b"\0"):
                    writer.write(data)
                else:
                    writer.seek(done)  # holes stay holes
            writer.truncate(done)
            os.fsync(writer.fileno())
        st = file.stat()
        os.utime(target / to, ns=(st.st_atime_ns, st.st_mtime_ns))
    except OSError as error:
        with contextlib.suppress(OSError):
            (target / to).unlink()
        return Saved(number, None, done, "", "", f"it could not be copied: {error.strerror}")
    return Saved(
        number,
        os.fspath(to),
        done,
        hasher.hexdigest(),
        begins.decode("ascii", "backslashreplace"),
        "",
    )
