"""Frameworks on the double of a device that runs behind its host: their own loops, with collectives
and updates that are queued.

What a stream would order and the host does here waits for the stream: a forward pass, and whoever
reads a state, or a number that was reduced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.training.ranks.asynchronous import BACKEND, AsynchronousAdam, Stream
from tests.training.ranks.behind import EARLY, OnDouble, put_wrong


def begin(directory: Path) -> OnDouble:
    """In this process, before its first group."""
    place = OnDouble()
    place.enter(directory)
    _queue(place.stream)
    return place


def join(rank: int, world: int, store: Path, gate: str = "") -> OnDouble:
    """Begin as a rank. `gate`: which one is wrong; empty: none."""
    memory = store.with_name(f"{store.name}-memory")
    memory.mkdir(exist_ok=True)
    place = begin(memory)
    dist.init_process_group(
        BACKEND, store=dist.FileStore(str(store), world), rank=rank, world_size=world
    )
    if gate:
        put_wrong(gate)
        torch.nn.modules.module.register_module_forward_hook(
            lambda *_: EARLY.append(place.record())
        )
    return place


def _queue(stream: Stream) -> None:
    """What torch does is on the stream from here on, or waits for it."""
    reduce = dist.all_reduce
    made = DistributedDataParallel.__init__
    forward = DistributedDataParallel.forward
    clip = torch.nn.utils.clip_grad_norm_
    of_model = torch.nn.Module.state_dict
    of_optimizer = torch.optim.Optimizer.state_dict

    def waits(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def waited(*given: Any, **named: Any) -> Any:
            stream.synchronize()
            return call(*given, **named)

        return waited

    def all_reduce(tensor: Any, *given: Any, **named: Any) -> Any:
        work = reduce(tensor, *given, **named)
        if tensor.numel() == 1:  # the host reads it
            stream.synchronize()
        return work

    def clip_grad_norm(parameters: Any, *given: Any, **named: Any) -> Any:
        values = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # the places of the gradients are those of the launch
        places = [torch.nn.Parameter(torch.empty(0)) for _ in values]
        norm = torch.zeros(())

        def work() -> None:
            norm.copy_(clip(places, *given, **named))

        for place, value in zip(places, values, strict=True):
            if value.grad is not None:
                place.data = value.data
                place.grad = value.grad.data
        stream.launch(work)
        return norm

    dist.all_reduce = all_reduce
    # without views the reducer copies on the host, before anything is reduced
    DistributedDataParallel.__init__ = functools.partialmethod(made, gradient_as_bucket_view=True)
    DistributedDataParallel.forward = waits(forward)
    torch.nn.Module.state_dict = waits(of_model)
    torch.optim.Optimizer.state_dict = waits(of_optimizer)
    torch.nn.utils.clip_grad_norm_ = clip_grad_norm


def put_megatron(place: OnDouble, *, reads_norm: bool = True) -> None:
    """Megatron's update is queued: the gradients in the optimizer's precision, its step, and the
    cast to the model's. Where gradients are clipped the host waits for their norm, as Megatron
    does.
    """
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    cast = DistributedOptimizer._copy_main_params_to_model_params
    prepare = DistributedOptimizer.prepare_grads
    steps = DistributedOptimizer.step_with_ready_grads
    make = DistributedOptimizer._init_optimizer_states_with_dummy_values

    class AdamW(AsynchronousAdam):
        def __init__(self, params: Any, **settings: Any) -> None:
            super().__init__(params, place.stream, decoupled_weight_decay=True, **settings)

    def queued(one: Any) -> None:
        if getattr(one, "is_stepping", False):
            place.do(lambda: cast(one))
        else:
            cast(one)

    def prepared(one: Any) -> Any:
        if one.config.clip_grad:
            place.order()
            return prepare(one)
        found = prepare(one)  # whose places are those of the launch
        values = [value for group in one.optimizer.param_groups for value in group["params"]]
        places = [value.grad for value in values]

        def work() -> None:
            prepare(one)
            for value, there in zip(values, places, strict=True):
                there.copy_(value.grad)
                value.grad = there

        place.do(work)
        return found

    def made(one: Any) -> None:
        make(one)
        place.order()  # what is copied into it is behind the step that makes it

    def stepped(one: Any) -> Any:
        one.is_stepping = True
        try:
            return steps(one)
        finally:
            one.is_stepping = False

    torch.optim.AdamW = AdamW
    if not reads_norm:
        ChainedOptimizer.get_grad_norm = lambda _: 0.0
    DistributedOptimizer._copy_main_params_to_model_params = queued
    DistributedOptimizer.prepare_grads = prepared
    DistributedOptimizer.step_with_ready_grads = stepped
    DistributedOptimizer._init_optimizer_states_with_dummy_values = made


def order_megatron(place: OnDouble) -> None:
    """What a model's parts exchange, where the groups are made: a forward pass reads at once what
    tensor-parallel ranks reduce. Megatron itself synchronizes behind what stages send each other.
    """
    from megatron.core import parallel_state

    place.order_in(parallel_state.get_tensor_model_parallel_group())
    torch.cuda.synchronize = lambda *_, **__: place.order()
