"""Where the output of ranks goes: files below `--log-dir` in torchrun's layout, and what of them is
shown as well.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from acpfs.training.launcher.streams import Std, Streams

TAIL_BYTES_MAX = 8 << 10
TAIL_LINES = 20
_SHOWN_BYTES = 1 << 16


@dataclass(frozen=True)
class RankLog:
    """Of one process."""

    directory: Path
    out: Path | None
    err: Path | None
    shown: Std

    @property
    def error_file(self) -> str:
        """Where torch's `@record` leaves an exception."""
        return str(self.directory / "error.json")

    def last_lines(self) -> list[str]:
        """The end of what it said, stderr if that is in a file; empty: it was on the terminal."""
        path = self.err or self.out
        if path is None:
            return []
        try:
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES_MAX))
                return file.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:]
        except OSError:
            return []


class RankLogs:
    """Of this launcher."""

    def __init__(self, directory: Path | None, run_id: str, streams: Streams) -> None:
        """`directory`: of the user's; without one, files go below a temporary one."""
        self._streams = streams
        self._given = directory
        self.directory = Path()
        self._name = f"{re.sub(r'[^A-Za-z0-9._-]', '_', run_id)}_{secrets.token_hex(4)}"

    def begin(self) -> None:
        """Make the directory.

        Raises:
            OSError: it cannot be made.
        """
        base = (
            self._given if self._given is not None else Path(tempfile.mkdtemp(prefix="acpfs-run-"))
        )
        self.directory = base / self._name
        self.directory.mkdir(parents=True)

    def of(self, attempt: int, local_rank: int, generation: int) -> RankLog:
        """For a process that is about to start."""
        own = (
            self.directory
            / f"attempt_{attempt}"
            / (f"{local_rank}" + (f".generation_{generation}" if generation else ""))
        )
        own.mkdir(parents=True, exist_ok=True)
        kept = self._streams.to_file(local_rank)
        return RankLog(
            own,
            own / "stdout.log" if kept & Std.OUT else None,
            own / "stderr.log" if kept & Std.ERR else None,
            self._streams.also_shown(local_rank),
        )


class Shown:
    """Shows what a rank writes to its files, as far as it is to be shown; `look` is called now and
    then, and behind its end.
    """

    def __init__(self, log: RankLog, role: str, local_rank: int) -> None:
        self._prefix = f"[{role}{local_rank}]:".encode()
        chosen = ((log.out, Std.OUT, sys.stdout), (log.err, Std.ERR, sys.stderr))
        self._files = {
            path.open("rb"): (stream, bytearray())
            for path, which, stream in chosen
            if path is not None and log.shown & which
        }

    def look(self, *, last: bool = False) -> None:
        """Show what is new, by whole lines. `last`: the rest, and close."""
        for file, (stream, kept) in self._files.items():
            while data := file.read(_SHOWN_BYTES):
                kept.extend(data)
                end = len(kept) if last and len(data) < _SHOWN_BYTES else kept.rfind(b"\n") + 1
                if end:
                    lines = bytes(kept[:end]).splitlines()
                    del kept[:end]
                    _show(stream, b"".join(self._prefix + line + b"\n" for line in lines))
            if last:
                if kept:
                    _show(stream, self._prefix + bytes(kept) + b"\n")
                file.close()
        if last:
            self._files = {}


def _show(stream: TextIO, lines: bytes) -> None:
    """What cannot be shown is in the files all the same, and no reason to end a job: where stdout
    goes may be full, or gone.
    """
    with contextlib.suppress(OSError, ValueError):
        stream.buffer.write(lines)
        stream.flush()
