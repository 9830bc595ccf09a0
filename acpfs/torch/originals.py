"""torch's own `save` and `load`, whatever `install` has put in their place, and what of torch's
private names is asked.

Owns the only list of those names: where one is missing, everything is torch's own call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.serialization import load as original_load
from torch.serialization import save as original_save

__all__ = ["has_skeletons", "is_ordinary", "original_load", "original_save", "skips_data"]


def has_skeletons() -> bool:
    """Whether this torch can write archives whose storages are still to come (from 2.6)."""
    return hasattr(torch.serialization, "skip_data") and _state() is not None


def skips_data() -> bool:
    """Whether the caller has asked torch for archives without storages."""
    return bool(getattr(_state(), "skip_data", True))


def is_ordinary() -> bool:
    """Whether tensors are made and read as ever: no fake ones."""
    guards: Any = getattr(torch, "_guards", None)
    active = getattr(guards, "active_fake_mode", None)
    return active is not None and active() is None


def _state() -> Any:
    return getattr(torch.serialization, "_serialization_tls", None)
