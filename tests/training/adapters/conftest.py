"""What needs frameworks: collected by the interpreter that has them all
(`tests/training/test_adapters.py` runs it).
"""

from __future__ import annotations

import importlib.util

collect_ignore_glob = (
    []
    if all(importlib.util.find_spec(name) for name in ("torch", "transformers", "lightning"))
    else ["*.py"]
)
