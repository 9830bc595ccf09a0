"""The checker: mount and backing directory against the history of the application.

Every function returns losses in words.

Shares no code with acpfs and believes nothing that acpfs says of what it has done; its gauges are
read only to see them return to zero.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from tests.drill.history import (
    File,
    History,
    State,
    differences,
    fits_sync,
    is_partly_written,
    overwritten,
)
from tests.drill.spec import HIDDEN, Tree, bytes_of

DIGEST_XATTR = "user.acpfs.xxh3"


def check_published(history: History, seen: Tree, until_s: float, what: str) -> list[str]:
    """The backing directory shows a state that the application had, no earlier one than was seen
    before or was promised.

    Moves `history.seen_at` on.
    """
    possible = history.possible()
    promised = possible.promised_until(until_s)
    found = possible.find(seen, promised)
    if found is not None:
        history.seen_at = min(found, len(history.states) - 1)
        return []
    anywhere = next(
        (index for index, state in enumerate(possible.states) if state.allows(seen)), None
    )
    if anywhere is not None:
        return [
            (
                f"{what}: shows state {anywhere}, but {possible.seen_at} was seen "
                f"and {promised} was "
                f"promised, of {len(possible.states)}"
            )
        ]
    nearest, lines = possible.nearest(seen)
    wrong = sorted(path for path, _entry in seen.items() ^ possible.states[nearest].tree.items())
    had = "; ".join(
        f"{path} was {[state.tree.get(path, ('', ''))[1][:6] for state in possible.states]}"
        for path in dict.fromkeys(wrong)
    )
    told = f"{possible.seen_at} was seen and {promised} promised; {sorted(seen)}; {had}"
    return [
        (
            f"{what}: shows what the application never had; nearest is state {nearest} of "
            f"{len(possible.states)}: {'; '.join(lines)} ({told})"
        )
    ]


def check_mount(
    history: History, seen: Tree, contents: dict[str, bytes]
) -> tuple[History, list[str]]:
    """The mount shows the latest state, with the call in doubt carried out or not (or, if it was
    not one call, in part).

    Returns the history as it has turned out.
    """
    possible = history.possible()
    if seen == possible.now():
        return possible, []
    doubt = history.doubt
    if seen == history.now() or (
        doubt is not None and _is_part_of(history, doubt.words, seen, contents)
    ):
        if (
            doubt is not None and doubt.words[0] == "sync"
        ):  # what rsync had done is committed step by step
            history.states.append(State(history.states[-1].tree, (doubt.words[1], doubt.words[2])))
        history.doubt = None
        begun = doubt is not None and doubt.words[0] == "store" and seen != history.now()
        _adopt(history, seen, contents)
        if doubt is not None and begun:
            history.leave_open(doubt.words[1])
        return history, []
    call = f", in doubt: {doubt.words[:4]}" if doubt is not None else ""
    return history, [
        f"the mount does not show the latest state{call}: "
        + "; ".join(differences(seen, possible.now()))
    ]


def _is_part_of(
    history: History, words: tuple[Any, ...], seen: Tree, contents: dict[str, bytes]
) -> bool:
    now = history.now()
    different = {path for path in seen.keys() | now.keys() if seen.get(path) != now.get(path)}
    if words[0] == "write":
        file = history.open[words[1]][0]
        paths = {path for path, node in history.nodes.items() if node is file}
        assert file.data is not None
        data = bytes_of(words[3], words[4])
        return different <= paths and all(
            path in contents and is_partly_written(contents[path], file.data, words[2], data)
            for path in paths
        )
    if words[0] == "store":
        return different <= {words[1]} and seen.get(words[1], ("file", ""))[0] == "file"
    return words[0] == "sync" and fits_sync(seen, now, words[1], words[2], torn=True)


def _adopt(history: History, seen: Tree, contents: dict[str, bytes]) -> None:
    """What was in doubt is as it was found: rsync makes directories, too."""
    for path, entry in seen.items():
        if entry[0] == "dir":
            history.nodes.setdefault(path, entry)
    for path, data in contents.items():
        file = history.nodes.get(path)
        if not isinstance(file, File):
            file = File(None, "")
            history.nodes[path] = file
        if file.data is not None:
            file.data = overwritten(b"", 0, data)
        else:
            file.whole = seen[path][1]


def check_equal(seen: Tree, expected: Tree, what: str) -> list[str]:
    """Two trees are the same."""
    return [f"{what}: " + "; ".join(differences(seen, expected))] if seen != expected else []


def check_checksums(backing: Path, *, xattrs: bool = True) -> list[str]:
    """The manifest, held against the files by the stock xxh128sum, is right and complete; so is the
    xattr at each file.
    """
    expected: dict[str, str] = {}
    for manifest in sorted((backing / HIDDEN / "manifest").glob("*.xxh128")):
        done = subprocess.run(
            ["xxh128sum", "--quiet", "-c", str(manifest)],
            cwd=backing,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return [
                (
                    f"xxh128sum -c {manifest.name}: {done.stdout.strip()[-300:]} "
                    f"{done.stderr.strip()[-300:]}"
                )
            ]
        expected |= {line[34:]: line[:32] for line in manifest.read_text().splitlines()}
    found = set(_files(backing))
    missing = [
        path for path in sorted(expected.keys() - found) if not path.startswith(f"{HIDDEN}/kept/")
    ]  # xxh128sum has found those
    losses = [f"the manifest names {path}, which is not there" for path in missing]
    losses += [f"the manifest does not name {path}" for path in sorted(found - expected.keys())]
    for path in sorted(found & expected.keys()) if xattrs else ():
        noted = os.getxattr(backing / path, DIGEST_XATTR).decode().split()[0]
        if noted != expected[path]:
            losses.append(f"the checksum at {path} is {noted}, in the manifest {expected[path]}")
    return losses


def check_notes(backing: Path) -> list[str]:
    """The checksum at each file is that of its bytes."""
    losses = []
    for path in _files(backing):
        noted = os.getxattr(backing / path, DIGEST_XATTR).decode().split()[0]
        found = xxhash.xxh3_128_hexdigest((backing / path).read_bytes())
        if noted != found:
            losses.append(f"the checksum at {path} is {noted}, its bytes have {found}")
    return losses


def _files(backing: Path) -> Iterable[str]:
    for directory, names, files in os.walk(backing):
        if HIDDEN in names:
            names.remove(HIDDEN)
        for name in files:
            path = Path(directory) / name
            if stat.S_ISREG(os.lstat(path).st_mode):
                yield str(path.relative_to(backing))


def check_gauges(status: dict[str, Any]) -> list[str]:
    """Everything that counts work in progress is zero."""
    gauges = {
        "queue_length": status["queue_length"],
        "queue_bytes": status["queue_bytes"],
        "parked": status["parked"],
        "interrupted": status["interrupted"],
        "open_files": status["open_files"],
        "dirty_bytes": status["ram"]["dirty_bytes"],
        "reserved_bytes": status["ram"]["reserved_bytes"],
        "waiting_writers": status["ram"]["waiting_writers"],
        "calls_out": status["backing_health"]["calls_out"],
    }
    return [f"after the drain {name} is {value}" for name, value in gauges.items() if value]
