"""Megatron-Core without an accelerator: what it calls a device is this processor.

Import it before Megatron.

Stands in for a device only: streams, events and memory of one. Optimizer, buffers, groups and
checkpoints are Megatron's own.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch

PROCESSOR = torch.device("cpu")
_type = torch.Tensor.type


class Nothing:
    """A stream or an event: everything on it is done already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Whatever it is for."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: Nothing()


def _type_on_device(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Megatron tells precisions apart by names such as torch.cuda.BFloat16Tensor."""
    found = _type(tensor, *args, **kwargs)
    return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found


def _here(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = PROCESSOR
        return make(*args, **kwargs)

    return made


def _to_host(
    tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:  # Megatron's signature
    """It is there already."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def stand_in() -> None:
    """For this process."""
    torch.Tensor.type = _type_on_device
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor
    for name in ("tensor", "zeros", "ones", "empty", "full", "empty_like", "zeros_like"):
        setattr(torch, name, _here(getattr(torch, name)))
    torch.cuda.current_device = lambda: PROCESSOR
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    for name in ("Stream", "Event", "current_stream", "default_stream"):
        setattr(torch.cuda, name, Nothing)
    torch.cuda.stream = lambda stream: nullcontext()
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = _to_host
    moe_utils.te_general_gemm = (
        None  # 0.16.1 looks at this name also where Transformer Engine is not installed
    )
