"""Maps a file and reads a byte of each page: what that took, as a line of JSON.

For `bench.mapped_reads`; the standard library only.

Usage: python -m bench.mapped_touch FILE.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import re
import resource
import sys
import time
from pathlib import Path

HUGE = 2 << 20
PAGE = 4096


def touch(path: str) -> None:
    """Map, read a byte of each page, and print what that took."""
    start = time.perf_counter()
    with open(path, "rb") as file:
        area = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE)
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(area))
    view = memoryview(area)
    opened = time.perf_counter()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    total = sum(view[::PAGE])
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    touched = time.perf_counter()
    text = Path("/proc/self/smaps").read_text()
    (found,) = re.findall(rf"^{address:x}-.*?VmFlags", text, re.MULTILINE | re.DOTALL)
    kib = {
        name: int(value) for name, value in re.findall(r"^(\w+): +(\d+) kB", found, re.MULTILINE)
    }
    print(
        json.dumps(
            {
                "open_s": opened - start,
                "touch_s": touched - opened,
                "faults": faults,
                "huge_kib": kib["FilePmdMapped"] + kib["ShmemPmdMapped"],
                "rss_kib": kib["Rss"],
                "past_2_mib": address % HUGE,
                "sum": total,
            }
        )
    )


if __name__ == "__main__":
    touch(sys.argv[1])
