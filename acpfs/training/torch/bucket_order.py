"""DistributedDataParallel lays its buckets out anew once, before its second forward pass, in the
order in which rank 0's gradients were complete: the host reads a broadcast of the model's own
group. An accelerator's collective that an abort ends leaves anything in its buffers, and with that
for numbers of parameters torch reads and writes outside of its lists (torch 2.13: a segmentation
fault in the next backward pass, also without acpfs).

So that one broadcast goes over gloo, where an abort is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

KINDS = {"cpu", "cuda"}
"""Of devices whose tensors gloo sends."""


def order_over(group: Any, model: Any) -> Callable[[], None]:
    """Have it go over this group; what this gives takes that back.

    Called by all ranks alike, for models on a device that runs behind its host: whether a rank is
    protected or not, it takes part. A model that is no DDP of all ranks, or is compiled with it,
    stays as it is.

    `group`: gloo's, of all ranks. `model`: as it is trained.
    """
    if not _lays_out_anew(model):
        return lambda: None

    # no method: a model that is copied copies its hooks, and functions stay what they are
    def before(model: Any, _: Any) -> None:
        # in a `join()` ranks without data answer for it over the model's own group
        if not torch.is_grad_enabled() or model._join_config.enable:  # noqa: SLF001
            return
        # what DDP does first in a forward pass, where there is something to do yet; there is no
        # public name for any of this
        reducer = model.reducer
        reducer._update_process_group(group)  # noqa: SLF001
        try:
            is_done = reducer._rebuild_buckets()  # noqa: SLF001
        finally:
            reducer._update_process_group(model.process_group)  # noqa: SLF001
        if is_done:
            model._has_rebuilt_buckets = True  # noqa: SLF001
            handle.remove()

    handle = model.register_forward_pre_hook(before)
    remove: Callable[[], None] = handle.remove
    return remove


def _lays_out_anew(model: Any) -> bool:
    if not isinstance(model, DistributedDataParallel):
        return False
    if model.find_unused_parameters and not model.static_graph:
        return False
    ranks = sorted(dist.get_process_group_ranks(model.process_group))
    kinds = {parameter.device.type for parameter in model.parameters()}
    return (
        ranks == list(range(dist.get_world_size()))
        and kinds <= KINDS
        and hasattr(model.reducer, "_update_process_group")  # not before torch 2.3
        and hasattr(model, "_join_config")
    )
