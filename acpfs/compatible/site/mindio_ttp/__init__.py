"""MindIO TTP's names, on acpfs (docs/MINDIO.md).

Switched on by `PYTHONPATH=$(acpfs mindio-path)`.
"""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[2] / "origin.py"))
