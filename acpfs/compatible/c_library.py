"""The two libraries of C that MindSpore's runtime opens, below the package `mindio_ttp`: built by
the machine's compiler.

The runtime finds them by the package's place, so they are made there; where that cannot be written,
the message says so.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

from acpfs.compatible.places import SITE
from acpfs.errors import MachineError

FRAMEWORK = Path("framework_ttp/libttp_framework.so")
C_API = Path("mindspore_api/libttp_c_api.so")
SOURCES = Path(__file__).resolve().parent / "entry_points"
BUILD_S = 60.0


def built(package: Path = SITE / "mindio_ttp") -> tuple[Path, Path]:
    """Both libraries; made if they are not there.

    Raises:
        MachineError: there is no compiler, or the place cannot be written.
    """
    framework = package / FRAMEWORK
    c_api = package / C_API
    if not framework.exists():
        _build(framework, SOURCES / "framework.c")
    if not c_api.exists():
        _build(c_api, SOURCES / "c_api.c", str(framework), "-Wl,-rpath,$ORIGIN/../framework_ttp")
    return framework, c_api


def _build(target: Path, source: Path, *further: str) -> None:
    if not os.access(target.parent, os.W_OK):  # the linker's last words would not say so
        raise MachineError(
            f"{target} cannot be built, where MindSpore's runtime looks for it: that directory "
            "cannot be written here"
        )
    made = target.with_name(f".{target.name}.{os.getpid()}")
    words = [
        "cc",
        "-std=c11",
        "-O2",
        "-shared",
        "-fPIC",
        "-Wl,-soname," + target.name,
        "-o",
        str(made),
        str(source),
        *further,
    ]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=BUILD_S,
        )
        if done.returncode:
            raise MachineError(
                f"{target} cannot be built, where MindSpore's runtime looks for it: "
                f"{done.stderr.strip().splitlines()[-1]}"
            )
        made.replace(target)
    except OSError as error:
        raise MachineError(
            f"{target} cannot be built, where MindSpore's runtime looks for it: {error.strerror}"
        ) from error
    finally:
        made.unlink(missing_ok=True)


class EntryPoints:
    """The words that the C side writes and reads, in this process."""

    def __init__(self, framework: Path) -> None:
        """`framework`: the library that has them; the runtime that opens it as well gets the same
        one.
        """
        library = ctypes.CDLL(str(framework), mode=ctypes.RTLD_GLOBAL)
        self.updating = ctypes.c_int64.in_dll(library, "acpfs_updating")
        self.finished = ctypes.c_int64.in_dll(library, "acpfs_finished")
        self.held = ctypes.c_int64.in_dll(library, "acpfs_held")
