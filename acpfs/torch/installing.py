"""Puts `save` and `load` in the place of torch's own, for code that calls those."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from acpfs.torch.loading import load
from acpfs.torch.originals import original_load, original_save
from acpfs.torch.saving import save


def install() -> None:
    """From here on `torch.save` and `torch.load` are this package's; twice is once.

    Who has taken them from torch before, by `from torch import save`, keeps torch's own.
    """
    for own, torchs in ((save, original_save), (load, original_load)):
        # libraries look there for what this torch can do, such as `weights_only`
        vars(own)["__signature__"] = inspect.signature(torchs)
    _put(save, load)


def uninstall() -> None:
    """As it was."""
    _put(original_save, original_load)


def _put(saving: Callable[..., Any], loading: Callable[..., Any]) -> None:
    for module in (torch, torch.serialization):
        setattr(module, "save", saving)  # noqa: B010 - a type checker knows torch's own
        setattr(module, "load", loading)  # noqa: B010
