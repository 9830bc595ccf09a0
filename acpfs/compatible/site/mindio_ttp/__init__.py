"""MindIO TTP's names, on acpfs (docs/TRAINING.md, "The product's own scripts").

Switched on by `PYTHONPATH=$(acpfs mindio-path)`.
"""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[2] / "origin.py"))
