"""Which output of which rank goes to a file, which is shown: torchrun's `--redirects`, `--tee` and
`--local-ranks-filter`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag

from acpfs.errors import ConfigError


class Std(IntFlag):
    """Streams of a process, with torchrun's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True)
class Streams:
    """By local rank; key -1: all others."""

    redirected: Mapping[int, Std] = field(default_factory=dict)
    teed: Mapping[int, Std] = field(default_factory=dict)
    shown: frozenset[int] = frozenset()
    """Local ranks whose output is shown; empty: all."""

    @classmethod
    def parsed(cls, redirects: str, tee: str, ranks: str) -> Streams:
        """Of three options' texts.

        Raises:
            ConfigError: no such thing.
        """
        try:
            shown = frozenset(int(rank) for rank in ranks.split(",") if rank.strip())
        except ValueError:
            raise ConfigError(
                f"--local-ranks-filter {ranks}: numbers, with commas between"
            ) from None
        return cls(_by_rank("--redirects", redirects), _by_rank("--tee", tee), shown)

    def to_file(self, local_rank: int) -> Std:
        """What goes to a file: a rank that is not shown has all of it there."""
        hidden = Std.ALL if self.shown and local_rank not in self.shown else Std.NONE
        return _of(self.redirected, local_rank) | _of(self.teed, local_rank) | hidden

    def also_shown(self, local_rank: int) -> Std:
        """What of that is shown, too."""
        return (
            _of(self.teed, local_rank) if not self.shown or local_rank in self.shown else Std.NONE
        )


def _of(chosen: Mapping[int, Std], local_rank: int) -> Std:
    return chosen.get(local_rank, chosen.get(-1, Std.NONE))


def _by_rank(option: str, text: str) -> dict[int, Std]:
    try:
        if ":" not in text:
            return {-1: Std(_number(text))}
        pairs = (pair.partition(":") for pair in text.split(","))
        return {int(rank): Std(_number(number)) for rank, _, number in pairs}
    except ValueError:
        raise ConfigError(f"{option} {text}: 0 to 3, or RANK:N,RANK:N,…") from None


def _number(text: str) -> int:
    number = int(text)
    if not 0 <= number <= Std.ALL:
        raise ValueError(text)
    return number
