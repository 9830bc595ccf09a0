"""What needs torchtitan and DeepSpeed: collected by the interpreter that has them
(`tests/training/test_ranks.py` runs it).
"""

from __future__ import annotations

import importlib.util

collect_ignore_glob = (
    []
    if all(importlib.util.find_spec(name) for name in ("torch", "torchtitan", "deepspeed"))
    else ["*.py"]
)
