"""Which of several daemons may have a mount: each hand-over is a generation, and whoever had an
earlier one does not get it back.

A container that gave its mount to a newer one may be started again before it is removed; it would
take the mount back. So each container says who it is (`acpfs mount --instance`), and the state that
goes from supervisor to supervisor says who had the mount in which generation. Pure; standard
library only. Who says nothing is a person, who is not refused.
"""

from __future__ import annotations

from typing import Any

REMEMBERED_MAX = 64
OUTLIVED = "a newer instance has taken this mount from this one"


def outlived(state: dict[str, Any], instance: str) -> str:
    """Why this instance does not get the mount; "": it does."""
    had = state.get("instances", {}).get(instance) if instance else None
    return OUTLIVED if had is not None and had < state.get("generation", 0) else ""


def next_generation(state: dict[str, Any], instance: str) -> dict[str, Any]:
    """What is said of it when this instance has the mount."""
    generation = int(state.get("generation", 0)) + 1
    had = dict(state.get("instances", {}))
    if instance:
        had.pop(instance, None)
        had[instance] = generation
    return {"generation": generation, "instances": dict(list(had.items())[-REMEMBERED_MAX:])}
