"""Names that nobody has yet, and times that are spread. Thread-safe where its source is."""

from __future__ import annotations

import random


class Chance:
    """What is drawn, from one source."""

    def __init__(self, source: random.Random) -> None:
        """`source`: of the system, so that a process that was forked draws something else."""
        self.source = source

    def token(self, count: int) -> str:
        """So many bytes, in hexadecimal digits."""
        return f"{self.source.getrandbits(8 * count):0{2 * count}x}"
