"""What a rename does to a table of paths: the names below a directory go with it, and what lay at
the new name is gone.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def move(nodes: dict[str, T], old: str, new: str) -> None:
    """rename(2)."""
    moved = _take(nodes, old)
    _take(nodes, new)
    _put(nodes, moved, old, new)


def exchange(nodes: dict[str, T], one: str, other: str) -> None:
    """renameat2(2) with RENAME_EXCHANGE."""
    first = _take(nodes, one)
    second = _take(nodes, other)
    _put(nodes, first, one, other)
    _put(nodes, second, other, one)


def _take(nodes: dict[str, T], path: str) -> dict[str, T]:
    return {p: nodes.pop(p) for p in [p for p in nodes if p == path or p.startswith(path + "/")]}


def _put(nodes: dict[str, T], moved: dict[str, T], old: str, new: str) -> None:
    nodes.update({new + path[len(old) :]: node for path, node in moved.items()})
