"""What needs torch: collected by the interpreter that has it (`tests/training/test_ranks.py` runs it)."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["*.py"]
