"""A copy of the package with a place that hangs once, when told, or with a bug: workers that a
debugger could not tell from real ones.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.rig.mounts import REPOSITORY

Place = tuple[str, str, str]
"""A file, the text in it behind which something is put, and that, with its indentation: a line that
calls `hang_here`, or a bug.
"""
_FIRST_IMPORT = "from __future__ import annotations\n"
_HANG = """

def hang_here():
    import os, threading
    if os.path.exists(FLAG):
        if not AGAIN:
            os.unlink(FLAG)
        threading.Event().wait()
"""


def flag_of(base: Path) -> Path:
    """Where this file is, the next one to come by hangs."""
    return base / "hang"


def code_that_hangs(base: Path, place: Place, *, again: bool = False) -> Path:
    """The directory to import it from, below `base`. `again`: all who come by hang."""
    hang = _HANG.replace("FLAG", repr(str(flag_of(base)))).replace("AGAIN", repr(again))
    return code_with(base, place, hang)


def code_with(base: Path, place: Place, functions: str = "") -> Path:
    """The same, with what `place` says, and some functions more."""
    code = base / "code"
    shutil.copytree(
        REPOSITORY / "acpfs", code / "acpfs", ignore=shutil.ignore_patterns("__pycache__")
    )
    name, after, put = place
    text = (code / name).read_text()
    assert text.count(after) == 1
    head, rest = text.split(after)
    (code / name).write_text(
        head.replace(_FIRST_IMPORT, _FIRST_IMPORT + functions) + after + put + rest
    )
    return code
