"""A whole tree as a value that can be compared: names, kinds, attributes, contents, xattrs, and
which names are links of one file.
"""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from pathlib import Path
from typing import Any

import xxhash

from tests.model.operations import comparable, own_xattrs

Snapshot = dict[str, tuple[Any, ...]]


def snapshot(root: Path) -> Snapshot:
    """Everything below `root` but `.acpfs`."""
    found: Snapshot = {}
    links: dict[int, list[str]] = defaultdict(list)
    _walk(os.fspath(root), "", found, links)
    for names in links.values():
        if len(names) > 1:
            for name in names:
                found[name] += (("links", tuple(sorted(names))),)
    return found


def _walk(directory: str, prefix: str, found: Snapshot, links: dict[int, list[str]]) -> None:
    for name in sorted(os.listdir(directory)):
        if prefix == "" and name == ".acpfs":
            continue
        path = f"{directory}/{name}"
        key = prefix + name
        st = os.lstat(path)
        found[key] = (*comparable(st), _content(path, st))
        if stat.S_ISDIR(st.st_mode):
            _walk(path, key + "/", found, links)
        else:
            links[st.st_ino].append(key)


def _content(path: str, st: os.stat_result) -> Any:
    if stat.S_ISLNK(st.st_mode):
        return os.readlink(path)
    xattrs = {name: os.getxattr(path, name) for name in own_xattrs(path)}
    if stat.S_ISREG(st.st_mode):
        with open(path, "rb") as file:
            return (xattrs, xxhash.xxh3_128_hexdigest(file.read()))
    return xattrs


def differences(left: Snapshot, right: Snapshot) -> list[str]:
    """One line per path that differs."""
    paths = sorted(left.keys() | right.keys())
    return [
        f"{path}: {left.get(path)} ≠ {right.get(path)}"
        for path in paths
        if left.get(path) != right.get(path)
    ]
