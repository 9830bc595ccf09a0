"""What a tree shows: contents by path, and what is known of a file beside them.

Beside contents: mode, owner and group, number of links, times and extended attributes, each under
the path of its file, a zero byte, and its name. A program says of them what it was told; what it
does not say is not compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from acpfs.backing.posix_acl import NAMES as ACLS

Shown = dict[bytes, bytes]
"""path → content of a file, target of a symlink; directories end with a slash.

Attributes: see above.
"""

MODE = b"mode"
OWNER = b"owner"
"""And group: two numbers with a colon."""
LINKS = b"links"
MTIME = b"mtime"
XATTR = b"user."
SAME = b"same"
"""The same value: names of one file. Only programs know it."""
PREFIX = b"\0"


def attribute(path: bytes, name: bytes) -> bytes:
    """Under which key it is."""
    return path + PREFIX + name


def bare(shown: Shown) -> Shown:
    """Contents alone."""
    return {path: content for path, content in shown.items() if PREFIX not in path}


def below(shown: Shown, directory: bytes) -> Shown:
    """What there is of one directory, itself with it."""
    return {path: content for path, content in shown.items() if path.startswith(directory)}


def is_of(key: bytes, path: bytes) -> bool:
    """Whether it is said of this path: its content, or an attribute; of a directory also what is
    below.
    """
    return key == path or key.startswith(path if path.endswith(b"/") else path + PREFIX)


def is_free(key: bytes) -> bool:
    """Whether it is an attribute that changes by itself, in no order with contents."""
    name = key.partition(PREFIX)[2]
    return name in (MODE, OWNER, MTIME) or is_extended(name)


def is_extended(name: bytes) -> bool:
    """Whether that is the name of an extended attribute."""
    return name.startswith(XATTR) or name in ACLS


def taken(shown: Shown, path: bytes) -> Shown:
    """Take out what is said of a path, and return it without that path."""
    return {key[len(path) :]: shown.pop(key) for key in list(shown) if is_of(key, path)}


def put(shown: Shown, path: bytes, what: Shown) -> None:
    """What `taken` has returned, at another path."""
    shown.update({path + key: value for key, value in what.items()})


def move(shown: Shown, source: bytes, target: bytes) -> None:
    """As rename does, which replaces."""
    what = taken(shown, source)
    taken(shown, target)
    put(shown, target, what)


def names_of(shown: Shown, path: bytes) -> list[bytes]:
    """All names of the file at `path`."""
    same = shown.get(attribute(path, SAME))
    if same is None:
        return [path]
    return [
        key[: -len(PREFIX + SAME)]
        for key, value in shown.items()
        if value == same and key.endswith(PREFIX + SAME)
    ]


def write(shown: Shown, path: bytes, content: bytes) -> None:
    """Another content, under all names of the file; nobody knows its time any more."""
    for name in names_of(shown, path):
        shown[name] = content
        shown.pop(attribute(name, MTIME), None)


def expected(shown: Shown) -> Shown:
    """What anybody can see of what a program was told."""
    found = dict(shown)
    for key, same in shown.items():
        if key.endswith(PREFIX + SAME):
            del found[key]
            path = key[: -len(PREFIX + SAME)]
            found[attribute(path, LINKS)] = b"%d" % list(shown.values()).count(same)
    return found


def as_asked(got: Shown, wanted: Shown) -> Shown:
    """`got` without attributes of which nothing is wanted, but for extended ones, which are all
    told.
    """
    return {
        key: value
        for key, value in got.items()
        if PREFIX not in key or key in wanted or is_extended(key.partition(PREFIX)[2])
    }


def is_as_told(got: Shown, told: Shown) -> bool:
    """Whether that is what the program was told."""
    wanted = expected(told)
    return as_asked(got, wanted) == wanted


def against(got: Shown, told: Shown) -> str:
    """For people: how it differs from what the program was told."""
    wanted = expected(told)
    return differences(as_asked(got, wanted), wanted)


def differences(got: Shown, wanted: Shown) -> str:
    """For people: the first few."""
    return "; ".join(itertools.islice(_differences(got, wanted), 5)) or "none"


def _equal_bytes(a: bytes, b: bytes) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(a), len(b)))


def _differences(got: Shown, wanted: Shown) -> Iterator[str]:
    for path in sorted({*got, *wanted}):
        found = got.get(path)
        wants = wanted.get(path)
        if found == wants:
            continue
        name = path.decode().replace("\0", ": ")
        if PREFIX in path:
            yield f"{name} is {found!r} instead of {wants!r}"
        elif wants is None:
            yield f"{name} should not be there ({len(found or b'')} bytes)"
        elif found is None:
            yield f"{name} is not there ({len(wants)} bytes)"
        else:
            equal = _equal_bytes(found, wants)
            yield f"{name} has {len(found)} bytes for {len(wants)}, the first {equal} equal"
