"""Whether a pointer names a path, by its text: on the member that is to change the pointer, and on
all others.

A symbolic link's text is what it leads to. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from acpfs.backing.lower import LowerPath

_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")
"""Bytes that no text has."""
_NUMBER = re.compile(rb"[0-9]+")
_NUMBER_ALONE = re.compile(rb"(?<![\w.+-])[0-9]+(?![\w+-]|\.\w)")
"""No part of a name: not the 7 of `step-7`."""

Mentions = Callable[[bytes, bytes], bool]
"""Whether a text names something by this name."""
Blind = Callable[[LowerPath, LowerPath], bool]
"""Whether a pointer, of which nobody knows what it says, may name that."""


def leads_to(
    text: bytes, pointer: LowerPath, taken: LowerPath, says: Mentions, *, parts: bool = True
) -> bool:
    """Whether a pointer with this text names what is moved or removed, or something below it.

    `parts`: whether what is taken may be a part of what is named.
    """
    shared = 0
    while shared < len(pointer) - 1 and pointer[: shared + 1] == taken[: shared + 1]:
        shared += 1
    names = taken[shared:] if parts else taken[-1:]
    return any(says(text, name) for name in names)


def anything(_pointer: LowerPath, _removed: LowerPath) -> bool:
    """It may name whatever there is."""
    return True


def nothing(_pointer: LowerPath, _moved: LowerPath) -> bool:
    """It is taken to name nothing."""
    return False


def lies_beside(pointer: LowerPath, removed: LowerPath) -> bool:
    """In the pointer's directory, or deeper: what is as large as that describes what lies there."""
    return removed[: len(pointer) - 1] == pointer[:-1]


def are_near(pointer: LowerPath, other: LowerPath) -> bool:
    """Whether the pointer lies at the top, or both below one directory there."""
    return len(pointer) == 1 or pointer[:1] == other[:1]


def may_mention(text: bytes, name: bytes) -> bool:
    """By the name itself, or by a number in it: `latest_checkpointed_iteration.txt` says 1000 of
    `iter_0001000`. `step-100` names no `step-1`, as its number goes on.

    In what is no text (a pickle), a letter or digit behind a name is no part of it.
    """
    if _BINARY.search(text) and name in text:
        return True
    whole = (
        rb"(?<![0-9])" if name[:1].isdigit() else rb"",
        re.escape(name),
        rb"(?![0-9])" if name[-1:].isdigit() else rb"",
    )
    if re.search(b"".join(whole), text):
        return True
    numbers = {int(found) for found in _NUMBER.findall(text)}
    return any(int(found) in numbers for found in _NUMBER.findall(name))


def mentions(text: bytes, name: bytes) -> bool:
    """The same, but neither by a part of a name nor by a number in one: `step-1` names no
    `step-10`, and no `step-7.gasp-1`. What is no text is taken as there.
    """
    if _BINARY.search(text) and name in text:
        return True
    if re.search(rb"(?<!\w)" + re.escape(name) + rb"(?!\w)", text):
        return True
    numbers = {int(found) for found in _NUMBER_ALONE.findall(text)}
    return any(int(found) in numbers for found in _NUMBER.findall(name))
