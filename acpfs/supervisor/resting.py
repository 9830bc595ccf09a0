"""What a supervisor in the foreground does when a newer one has its mount: nothing, until it is
told to end.

Who runs a container would start one that ends again, and that would take the mount back. When
nobody has the mount any more, the newer one was withdrawn: then it ends, and is started again.
Standard library only, no thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from acpfs.supervisor import handover, keeper_client

LOOK_S = 2.0
LOOKS = 3
"""So often in a row nobody had it: a restart of the newer one takes a moment."""
WITHDRAWN = 1


def rest(settings: dict[str, Any], look_once: Callable[[float], bool]) -> int:
    """Until it is to end; the exit code.

    `look_once`: waits so long, and says whether a signal came.
    """
    sys.stderr.write("acpfs: another process has the mount; this one only waits to be ended\n")
    missed = 0
    while missed < LOOKS:
        if look_once(LOOK_S):
            return 0
        somebody = (
            handover.answers(handover.door_of(settings))
            or keeper_client.held_mount(settings) is not None
        )
        missed = 0 if somebody else missed + 1
    return WITHDRAWN
