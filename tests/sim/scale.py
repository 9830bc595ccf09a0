"""Sizes of the passthrough lane, a 128th of what they are: files of a few MiB outgrow a RAM of one.

What is a share of the budget, or a page of the memory, stays as it is.
"""

from __future__ import annotations

from types import ModuleType

from acpfs.filesystem import admission, hold, lane_use
from acpfs.filesystem.content import body, contents, outgrown
from acpfs.ram import tier

SCALE = 128
SIZES: tuple[tuple[ModuleType, str], ...] = (
    (admission, "MARGIN_BYTES"),
    (admission, "REACH_BYTES_MAX"),
    (body, "OUTGROWN_PIECE_BYTES"),
    (contents, "COPY_AT_FREEZE_BYTES_MAX"),
    (contents, "SLACK_LEFT_BYTES"),
    (hold, "BEYOND_BYTES"),
    (hold, "BEYOND_LEFT_BYTES"),
    (hold, "GAP_ROOM_BYTES"),
    (hold, "GRANT_BYTES_MAX"),
    (hold, "GRANT_BYTES_MIN"),
    (hold, "MARGIN_BYTES_MAX"),
    (lane_use, "COPY_AT_FREEZE_BYTES_MAX"),
    (outgrown, "PIECE"),
    (tier, "HUGE_PAGE_BYTES"),
)
INTERVAL_MIN_S = 0.01
"""Nobody writes as fast here as the fastest machine does."""


def install() -> None:
    """Once in a process."""
    for module, name in SIZES:
        setattr(module, name, getattr(module, name) // SCALE)
    hold.INTERVAL_MIN_S = INTERVAL_MIN_S
