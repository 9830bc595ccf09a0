"""One module per framework: `protect` with what that framework knows already, and its own
checkpoints. Each imports its framework.
"""

from __future__ import annotations

from collections.abc import Callable


def and_then(first: Callable[[], None], second: Callable[[], None] | None) -> Callable[[], None]:
    """What a framework does at the end of a step, and then what the loop does beside that."""
    if second is None:
        return first
    others = second

    def both() -> None:
        first()
        others()

    return both
