"""Python stacks of all threads of this process, taken by a thread that is not the one that
hangs.
"""

from __future__ import annotations

import sys
import threading
import traceback

FRAMES_MAX = 60


def all_stacks() -> str:
    """As a traceback has them, the main thread first."""
    # the documented way
    frames = sys._current_frames()  # noqa: SLF001
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    ordered = sorted(frames.items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"thread {names.get(ident, ident)}\n"
        f"{''.join(traceback.format_stack(frame, limit=FRAMES_MAX))}"
        for ident, frame in ordered
    )
