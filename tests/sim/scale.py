"""Sizes of the passthrough lane and of streams, a 128th of what they are: files of a few MiB
outgrow a RAM of one, and files of 60 KB are large ones, which have turns.

What is a share of the budget, or a page of the memory, stays as it is.
"""

from __future__ import annotations

from types import ModuleType

from acpfs.filesystem import admission, hold, lane_use
from acpfs.filesystem.content import body, contents, outgrown
from acpfs.ram import tier
from acpfs.writeback import engine
from acpfs.writeback.streams import bandwidth, scheduler, staged, stream_queue, streams

SCALE = 128
SIZES: tuple[tuple[ModuleType, str], ...] = (
    (admission, "MARGIN_BYTES"),
    (admission, "REACH_BYTES_MAX"),
    (bandwidth, "SLICE_MAX_BYTES"),
    (body, "OUTGROWN_PIECE_BYTES"),
    (contents, "COPY_AT_FREEZE_BYTES_MAX"),
    (contents, "SLACK_LEFT_BYTES"),
    (engine, "SMALL_BYTES_MAX"),
    (hold, "BEYOND_BYTES"),
    (hold, "BEYOND_LEFT_BYTES"),
    (hold, "GAP_ROOM_BYTES"),
    (hold, "GRANT_BYTES_MAX"),
    (hold, "GRANT_BYTES_MIN"),
    (hold, "MARGIN_BYTES_MAX"),
    (lane_use, "COPY_AT_FREEZE_BYTES_MAX"),
    (outgrown, "PIECE"),
    (scheduler, "UNDER_WAY_BYTES"),
    (staged, "SMALL_BYTES_MAX"),
    (stream_queue, "SMALL_BYTES_MAX"),
    (streams, "SLICE_MAX_BYTES"),
    (streams, "SMALL_BYTES_MAX"),
    (streams, "UNDER_WAY_BYTES"),
    (tier, "HUGE_PAGE_BYTES"),
)
INTERVAL_MIN_S = 0.01
"""Nobody writes as fast here as the fastest machine does."""


def install() -> None:
    """Once in a process."""
    for module, name in SIZES:
        setattr(module, name, getattr(module, name) // SCALE)
    hold.INTERVAL_MIN_S = INTERVAL_MIN_S
