"""A copy of the package with a place that hangs once, when told: a worker that a debugger could not tell from a real fault."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.rig.mounts import REPOSITORY

Place = tuple[str, str, str]
"""A file, the text in it behind which to hang, and the line that calls `hang_here`, with its indentation."""
_FIRST_IMPORT = "from __future__ import annotations\n"
_HANG = """

def hang_here():
    import os, threading
    if os.path.exists(FLAG):
        os.unlink(FLAG)
        threading.Event().wait()
"""


def flag_of(base: Path) -> Path:
    """Where this file is, the next one to come by hangs."""
    return base / "hang"


def code_that_hangs(base: Path, place: Place) -> Path:
    """The directory to import it from, below `base`."""
    code = base / "code"
    shutil.copytree(
        REPOSITORY / "acpfs", code / "acpfs", ignore=shutil.ignore_patterns("__pycache__")
    )
    name, after, call = place
    text = (code / name).read_text()
    assert text.count(after) == 1
    head, rest = text.split(after)
    hang = _HANG.replace("FLAG", repr(str(flag_of(base))))
    (code / name).write_text(
        head.replace(_FIRST_IMPORT, _FIRST_IMPORT + hang) + after + call + rest
    )
    return code
