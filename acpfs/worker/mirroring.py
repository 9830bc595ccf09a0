"""The mirror of a mount: whose it is after a reboot, what it holds, and how it begins and ends.

Looks at disks only before a mount and at its end, from threads that may hang; a worker that takes a
session over asks them nothing. Not thread-safe: used at start and end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from acpfs.backing.identity import Identity, has_node_id
from acpfs.backing.leftovers import forget_journals
from acpfs.backing.lower import Lower
from acpfs.config import Settings, SpillMode
from acpfs.errors import MachineError, RefusedError
from acpfs.filesystem.salvage import Salvaged, salvage
from acpfs.logger import get_logger
from acpfs.mounting.checks import BACKING_WAIT_S, within
from acpfs.ram.place import Place
from acpfs.ram.spill_directory import SpillDirectory
from acpfs.ram.state import forget
from acpfs.runtime.chance import Chance
from acpfs.writeback.adopting.under_way import not_fenced, sentence
from acpfs.writeback.copies import on_disk, on_storage
from acpfs.writeback.copies.held_copies import ABOUT
from acpfs.writeback.copies.journal_frames import DamagedFrameError, NewerJournalError
from acpfs.writeback.copies.journal_marks import read_mark
from acpfs.writeback.copies.member_journals import ON_STORAGE
from acpfs.writeback.log.ops import Op
from acpfs.writeback.sources.mirror import NoMirror
from acpfs.writeback.sources.spill import Spill

SPILL_WAIT_S = 30.0
REMOVE_WAIT_S = 20.0
RECOVER_WAIT_S = 300.0
"""Reading a journal of a million operations takes about half a minute."""
_PLACES = {"spill", "holder", "journal"}
"""In a mark: where the journal is."""

log = get_logger(__name__)


def _is_mirror(settings: Settings) -> bool:
    return settings.spill is not None and settings.spill_mode is SpillMode.MIRROR


# -- the node


def remembered_node(settings: Settings, runtime: Path) -> str | None:
    """The node id of this mount point's last mirror, where a reboot has taken the one in the
    runtime directory; else None.

    Also for a mount without the mirror: it must find what is mirrored, to be refused.

    Raises:
        MachineError: the disk does not answer.
    """
    if (
        settings.spill is None
        or settings.node_id is not None
        or has_node_id(runtime, settings.mountpoint)
    ):
        return None
    found: list[str] = []
    within(
        SPILL_WAIT_S,
        f"spill directory {settings.spill} does not answer",
        lambda: found.extend(_read_node(_node_file(settings))),
    )
    return found[0] if found else None


def remember_node(settings: Settings, node: str) -> None:
    """For `remembered_node` after a reboot."""
    if _is_mirror(settings):
        within(
            SPILL_WAIT_S,
            f"spill directory {settings.spill} does not answer",
            lambda: _write_node(_node_file(settings), node),
        )


def _node_file(settings: Settings) -> Path:
    assert settings.spill is not None
    digest = hashlib.sha256(os.fsencode(settings.mountpoint)).hexdigest()[:16]
    return settings.spill / f"acpfs-nodes-{os.getuid()}" / digest


def _write_node(file: Path, node: str) -> None:
    with contextlib.suppress(FileExistsError):
        file.parent.mkdir(mode=0o700)
    temporary = file.with_suffix(f".{os.getpid()}")
    fd = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    with os.fdopen(fd, "w") as stream:
        stream.write(f"{node}\n")
        stream.flush()
        os.fsync(fd)
    temporary.rename(file)


def _read_node(file: Path) -> list[str]:
    """One, or none where there is none or it is not ours."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    with os.fdopen(fd) as stream:
        return [stream.read(64).strip()] if os.fstat(fd).st_uid == os.getuid() else []


# -- after the RAM tier was lost


def recover(
    settings: Settings, lower: Lower, identity: Identity, place: Place, state: Path, chance: Chance
) -> None:
    """What an earlier mount mirrored, and did not drain, becomes the state of this one.

    Raises:
        RefusedError: there is something, but not where this mount is told to look.
        MachineError: a disk does not answer, or refuses.
    """
    if state.exists():
        return
    marks: list[dict[str, str]] = []
    complaint = f"backing directory {settings.backing} does not answer"
    way_out = f"to give it up, remove {settings.backing}/.acpfs/mirrors/{identity.node_id}"

    def look_for_mark() -> None:
        try:
            marks.extend(filter(None, [read_mark(lower, identity.node_id)]))
        except ValueError as error:
            raise MachineError(
                f"the mark of what the last mount mirrored is damaged: {error}; {way_out}"
            ) from error

    within(BACKING_WAIT_S, complaint, look_for_mark)
    if not marks:
        if settings.adopts_alone:
            raise RefusedError(f"nothing that is held of {identity.node_id} counts any more")
        return
    _check_place(settings, identity, marks[0], way_out)
    told = f"what the last mount did not drain is mirrored in {marks[0].get('spill', '?')}"
    if settings.spill is None or not _is_mirror(settings):
        raise RefusedError(f"{told}: mount with --spill and --spill-mode mirror; {way_out}")
    directory = SpillDirectory(
        settings.spill / f"acpfs-{identity.volume_id}-{identity.node_id}", chance
    )
    found: list[Salvaged] = []

    def look() -> None:
        try:
            found.append(_salvaged(settings, lower, identity, state, directory, marks[0]))
        except (NoJournalError, NewerJournalError) as why:
            raise RefusedError(f"{told}, and {why}; {way_out}") from why
        except (sqlite3.Error, DamagedFrameError) as error:
            raise MachineError(
                f"the mirror's journal {marks[0].get('token')} in {directory.path} cannot be read: "
                f"{error}; {way_out}"
            ) from error

    within(RECOVER_WAIT_S, f"spill directory {settings.spill} does not answer", look)
    place.found = True
    if settings.adopts is not None:
        place.kept_until = _kept_until(settings.spill, found[0])
    _tell(found[0], place)


def _check_place(
    settings: Settings, identity: Identity, mark: dict[str, str], way_out: str
) -> None:
    """Whether this mount may read what the mark names."""
    if "holder" in mark and not _is_adopted(settings, mark):
        raise RefusedError(
            f"what the last mount did not drain is held by node {mark['holder']}, in its RAM: "
            f"`acpfs-ctl adopt {identity.node_id}` there drains it; {way_out}"
        )
    if not mark.keys() & _PLACES:
        raise RefusedError(
            "what the last mount did not drain is in a place of which this acpfs does not know: "
            f"mount with the acpfs that left it; {way_out}"
        )


class NoJournalError(Exception):
    """The journal that the mark names is not in the spill directory."""


def _salvaged(
    settings: Settings,
    lower: Lower,
    identity: Identity,
    state: Path,
    directory: SpillDirectory,
    mark: dict[str, str],
) -> Salvaged:
    """Of the journal that the mark names, with the copies in that directory."""
    token = mark.get("token", "")
    if mark.get("journal") == ON_STORAGE:
        # the holder was out of reach at the end: what it was not told is on the storage
        journal = Path(".acpfs/journals") / f"{identity.node_id}+{token}"
        read_into = partial(
            on_storage.read_into, lower, identity.node_id, token, scratch=state.parent
        )
    else:
        if (missing := on_disk.missing(directory.path, token)) is not None:
            raise NoJournalError(f"{missing} is not there: is the disk mounted?")
        journal = directory.path / on_disk.log_name(token)
        read_into = partial(on_disk.read_into, directory.path, token)
    forget(state)
    look = partial(_check_fenced, identity.node_id) if settings.adopts_alone else _nothing
    return salvage(read_into, journal, state, directory.size, look)


def _nothing(_db: sqlite3.Connection) -> None:
    """Whoever asked for it knows that the node is off."""


def _check_fenced(node: str, db: sqlite3.Connection) -> None:
    if found := not_fenced(db):
        raise RefusedError(f"{node} is not adopted without being asked: {sentence(found)}")


def _is_adopted(settings: Settings, mark: dict[str, str]) -> bool:
    """Whether this mount drains the copy that the mark names, at its holder."""
    return (
        settings.adopts == mark["holder"]
        and settings.spill is not None
        and settings.spill.name == mark.get("session")
    )


def _kept_until(session: Path, found: Salvaged) -> float | None:
    """What the lost node had closed before then is in the copy, by what it said itself and by the
    last step that came here; not what the copy lacks all the same.
    """
    until = found.known_until
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        until = max(until, float(json.loads((session / ABOUT).read_bytes())["clock"]))
    if found.lost_since is not None:
        until = min(until, found.lost_since)
    return until or None


def _tell(found: Salvaged, place: Place) -> None:
    log.warning(
        "the RAM tier was lost: going on from the mirror",
        operations=found.operations,
        bytes=found.bytes,
        lost=found.lost,
    )
    if found.lost:
        names = f" ({', '.join(found.lost_names)})" if found.lost_names else ""
        place.warnings.append(
            f"{found.lost} operations were not mirrored yet when the RAM tier was lost, and are "
            f"lost with it{names}"
        )


# -- beginning and end


def journal(
    spill: Spill | None, lower: Lower, identity: Identity
) -> Callable[[Sequence[Op]], None]:
    """What the engine asks before the operations that it carries out next."""
    if spill is None or spill.mirror is None:
        return NoMirror(lower, identity.node_id).before
    return spill.mirror.before


def begin(spill: Spill | None) -> None:
    """All tables of the state have been created: the journal can begin with a copy of them."""
    if spill is not None:
        spill.begin_journal()


def take_apart(spill: Spill, lower: Lower, node: str, *, nothing_left: bool) -> None:
    """At the end of a mount; a disk that hangs is not waited for long."""
    spill.close()

    def remove() -> None:
        if spill.mirror is not None:
            spill.mirror.close(nothing_left=nothing_left)
        if nothing_left:
            spill.directory.give_up()
            forget_journals(lower, node.encode())

    try:
        within(REMOVE_WAIT_S, "spill directory", remove)
    except (MachineError, OSError):
        # costs space, and a journal that says that nothing is left; the next mount removes both
        return
