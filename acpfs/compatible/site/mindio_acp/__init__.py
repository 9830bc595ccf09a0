"""MindIO ACP's names, on acpfs (docs/MINDIO.md).

Switched on by `PYTHONPATH=$(acpfs mindio-path)`.
"""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[2] / "origin.py"))

from acpfs.compatible.checkpoint_files import (  # noqa: E402  # acpfs is importable only now
    convert,
    create_file,
    flush,
    initialize,
    load,
    multi_save,
    open_file,
    preload,
    register_checker,
    save,
)
from acpfs.compatible.rank_checkpoints import CheckpointHelper  # noqa: E402

__all__ = [
    "CheckpointHelper",
    "convert",
    "create_file",
    "flush",
    "initialize",
    "load",
    "multi_save",
    "open_file",
    "preload",
    "register_checker",
    "save",
]
