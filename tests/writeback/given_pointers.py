"""Which operations make and take pointers, said by a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from acpfs.writeback.log.ops import Op


@dataclass(frozen=True)
class GivenPointers:
    """As `acpfs.writeback.members.pointers.Pointers` for the gate."""

    makes: Callable[[Op], bool]
    takes: Callable[[Op], bool]
