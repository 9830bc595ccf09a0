"""Plain torch files for the modules of the product's names: `torch.save` and `torch.load`, and
nothing else of torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import IO, Any

import torch


def save(obj: Any, file: IO[bytes]) -> None:
    """As `torch.save`."""
    torch.save(obj, file)


def load(path: str, map_location: Any, weights_only: bool) -> Any:
    """As `torch.load`."""
    return torch.load(path, map_location=map_location, weights_only=weights_only)


def load_rewritten(
    rewrite: Callable[[IO[bytes]], None], map_location: Any, weights_only: bool
) -> Any:
    """What `rewrite` writes as a torch file, loaded; the file is gone afterwards."""
    with tempfile.TemporaryFile() as file:
        rewrite(file)
        file.seek(0)
        return torch.load(file, map_location=map_location, weights_only=weights_only)
