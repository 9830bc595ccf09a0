"""What a worker leaves to the next worker of the same kernel session, beside the state database.

Open files and directories, what the kernel knows, backing ids, calls that were carried out, and a
few facts that the kernel or the backing directory will not say again.

Owns where these records lie, and when they hold: they belong to one session, named by a token that
its first worker makes and the supervisor hands to the next one. Under another token they are void.
Does not know what the records mean: each layer reads its own.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
import threading
from pathlib import Path
from typing import Any

from acpfs.errors import RefusedError, unknown_version
from acpfs.ram.mapped_records import Slots

KEPT_VERSION = 1
"""Format of the records. A worker takes no session over whose records are newer than itself."""
GENERATION_BITS = 32
HANDLE_WORDS = 9
DIRECTORY_WORDS = 3
REFERENCE_WORDS = 2
BACKING_WORDS = 3
CALL_WORDS = 2
GIVEN_UP_MAX = 64
"""The newest: a worker serves on behind each, and is sent again what was under way."""
_GIVEN_UP = "given_up"
HUNG_WORDS = 2
RAM_CALL_WORDS = 3
HANGS_MAX = 2
"""Workers that one request may hang: the first, and one that carries it out in a thread of its
own.
"""
_FACTS = "facts.json"
_HANDLES = "handles.slots"
_LISTING = "listing-"
LISTINGS_BYTES_MAX = 32 << 20
"""Of all directories that are open together: some 100 with 10,000 names."""


class Kept:
    """The records of one session."""

    def __init__(self, directory: Path | None = None, session: str = "") -> None:
        """Take over what lies in `directory` if it is this session's, else begin anew.

        Without a directory nothing is kept.

        Raises:
            RefusedError: the records were written by a newer acpfs.
        """
        self._directory = directory
        self._facts: dict[str, Any] = {}
        self.former_handles: list[tuple[int, ...]] = []
        """Records of files that were open when the session before ended."""
        self.taken_over = directory is not None and self._found(directory, session)
        if directory is not None and not self.taken_over:
            self.former_handles = self._read_former(directory)
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(mode=0o700)
        self.generation = int(self._facts.get("generation", 0)) + 1
        """Counts the workers of the session from 1."""
        self.handles = self._slots("handles", HANDLE_WORDS)
        self.directories = self._slots("directories", DIRECTORY_WORDS)
        self.references = self._slots("references", REFERENCE_WORDS)
        self.reference_slots = self.references.by_first_word()
        """The slot of each node's references; made once, because a next worker waits for 100,000.

        Kept up by the transport.
        """
        self.backings = self._slots("backings", BACKING_WORDS)
        self.calls = self._slots("calls", CALL_WORDS)
        self.hung = self._slots("hung", HUNG_WORDS)
        self.ram_calls = self._slots("ram_calls", RAM_CALL_WORDS)
        self._listings = (
            {
                int(file.name[len(_LISTING) :]): file.stat().st_size
                for file in directory.glob(_LISTING + "*")
            }
            if directory
            else {}
        )
        """Bytes of each that is kept."""
        self.serving = threading.local()
        """`unique`: the number of the request that this thread serves, or has served last."""
        given_up = {int(unique) for unique in self._facts.get(_GIVEN_UP, ())}
        given_up |= {unique for _slot, (unique, hangs) in self.hung if hangs >= HANGS_MAX}
        self.given_up = frozenset(given_up)
        """Requests over which an earlier worker ended by a bug, or two of them hung.

        Answered with an error, they are not tried again.
        """
        self._facts |= {"session": session, "version": KEPT_VERSION, "generation": self.generation}
        self._write_facts()

    @staticmethod
    def _read_former(directory: Path) -> list[tuple[int, ...]]:
        path = directory / _HANDLES
        try:
            version = json.loads((directory / _FACTS).read_bytes())["version"]
            if unknown_version("", version, KEPT_VERSION, "") or not path.exists():
                return []
            slots = Slots(path, HANDLE_WORDS)
        except (OSError, ValueError, KeyError, TypeError):
            return []
        found = [words for _slot, words in slots]
        slots.close()
        return found

    def _found(self, directory: Path, session: str) -> bool:
        try:
            facts = json.loads((directory / _FACTS).read_bytes())
        except (OSError, ValueError):
            return False
        if not session or facts.get("session") != session:
            return False
        what = f"the session in {directory}"
        if why := unknown_version(what, facts["version"], KEPT_VERSION, "keep the newer acpfs"):
            raise RefusedError(why)
        self._facts = facts
        return True

    def _slots(self, name: str, words: int) -> Slots:
        return Slots(None if self._directory is None else self._directory / f"{name}.slots", words)

    @property
    def first_number(self) -> int:
        """Handle numbers of this worker are larger: none that the kernel may still have is given
        twice.
        """
        return self.generation << GENERATION_BITS if self.taken_over else 0

    def references_of(self, ino: int) -> int:
        """How many references to the node the kernel has."""
        slot = self.reference_slots.get(ino)
        return 0 if slot is None else self.references.record(slot)[1]

    def give_up(self) -> bool:
        """This worker ends by a bug in this thread: what it serves is not tried again; whether
        there was anything.
        """
        unique: int = getattr(self.serving, "unique", 0)
        if not unique:
            return False
        try:
            self.record(_GIVEN_UP, [*sorted(self.given_up)[-GIVEN_UP_MAX:], unique])
        except OSError:  # no page is left for it: it is tried again, as often as `Restarts` has it
            return False
        return True

    # -- facts

    def fact(self, name: str) -> Any:
        """What was recorded under a name; None: nothing."""
        return self._facts.get(name)

    def record(self, name: str, value: Any) -> None:
        """Record something that can be written as JSON; the file changes whole or not at all."""
        if self._facts.get(name) != value:
            self._facts[name] = value
            self._write_facts()

    def _write_facts(self) -> None:
        if self._directory is None:
            return
        data = json.dumps(self._facts).encode()
        temporary = self._directory / f".{_FACTS}"
        final = self._directory / _FACTS
        try:
            temporary.write_bytes(data)
            temporary.rename(final)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno != errno.ENOSPC or not final.exists() or len(data) > mmap.PAGESIZE:
                raise
            # The tmpfs has no page left, and a worker that did not begin would end the mount: the
            # page that is there is written over, with blanks behind. That is whole or not at all,
            # too: a kill takes effect between two pages.
            with open(final, "r+b", buffering=0) as file:
                file.write(data.ljust(final.stat().st_size))

    # -- listings

    def write_listing(self, number: int, names: list[bytes]) -> None:
        """Keep the names that an open directory showed, where there is room.

        Without them, a listing in whose middle the worker is replaced is made anew, and may show a
        name twice or not at all. That is better than no listing: any user can have any number of
        large directories open.
        """
        if self._directory is None:
            return
        self.remove_listing(number)
        text = b"\0".join(names)
        if sum(self._listings.values()) + len(text) > LISTINGS_BYTES_MAX:
            return
        temporary = self._directory / ".listing"
        try:
            temporary.write_bytes(text)
            temporary.rename(self._directory / f"{_LISTING}{number}")
        except OSError:  # the tmpfs is full
            temporary.unlink(missing_ok=True)
        else:
            self._listings[number] = len(text)

    def read_listing(self, number: int) -> list[bytes] | None:
        """The names that an open directory showed; None: it has not been read yet."""
        if self._directory is None:
            return None
        try:
            text = (self._directory / f"{_LISTING}{number}").read_bytes()
        except FileNotFoundError:
            return None
        return text.split(b"\0") if text else []

    def remove_listing(self, number: int) -> None:
        """The directory was closed."""
        if self._directory is not None and self._listings.pop(number, None) is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._directory / f"{_LISTING}{number}")

    def close(self) -> None:
        """Let go of the files; the records stay."""
        for slots in (
            self.handles,
            self.directories,
            self.references,
            self.backings,
            self.calls,
            self.hung,
            self.ram_calls,
        ):
            slots.close()
