"""Objects of all kinds that people save, each made from a seed."""

from __future__ import annotations

import collections
import dataclasses
import random
import warnings
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import torch

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int8),
    *(torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn),
    torch.uint16,
)


class Labelled(torch.Tensor):  # type: ignore[misc]
    """A subclass with something of its own."""


class Reducing:
    """Makes the tensor that is saved only when it is pickled."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return Reducing, (self.value + 0,)


@dataclasses.dataclass
class Record:
    """Of a user."""

    weight: torch.Tensor
    where: PurePosixPath


def _tensor(rng: random.Random) -> torch.Tensor:
    """Of any type and shape, perhaps not contiguous; up to some MiB."""
    shape = [rng.choice((0, 1, 2, 3, 17, 64)) for _ in range(rng.randrange(4))]
    if rng.random() < 0.1:
        shape = [rng.randrange(1 << 18, 1 << 20)]
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    raw = torch.randint(0, 2, shape, generator=generator)
    made = raw.to(rng.choice(DTYPES))
    return made.transpose(0, 1) if made.dim() > 1 and rng.random() < 0.3 else made


def _of(rng: random.Random, depth: int, known: list[torch.Tensor]) -> Any:
    """Something nested, in which tensors come more than once, and views of them."""
    kind = rng.randrange(9 if depth else 5)
    if kind == 0 and known:
        return rng.choice(known)
    if kind == 1 and known:
        whole = rng.choice(known)
        return whole[: len(whole) // 2] if whole.dim() else whole.view(())
    if kind < 4:
        known.append(_tensor(rng))
        return known[-1]
    if kind == 4:
        return rng.choice([None, 3, "text", 2.5, b"bytes", torch.float32, torch.Size([2, 3])])
    parts = [_of(rng, depth - 1, known) for _ in range(rng.randrange(5))]
    if kind < 7:
        return {f"part{number}": part for number, part in enumerate(parts)}
    return tuple(parts) if kind == 7 else parts


def anything(seed: int) -> Any:
    """A random object that plain `torch.load` takes with `weights_only`."""
    return _of(random.Random(seed), 3, [])


def _trained() -> dict[str, Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.BatchNorm1d(400))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 300)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}


def _tied() -> dict[str, torch.Tensor]:
    weight = torch.randn(2000, 1000)
    return {"in": weight, "out": weight, "rows": weight[10:20], "column": weight[:, 3]}


def _quantized() -> list[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            torch.quantize_per_tensor(torch.randn(1000), 0.1, 3, torch.quint8),
            torch.quantize_per_channel(
                torch.randn(4, 9), torch.rand(4), torch.zeros(4), 0, torch.qint8
            ),
        ]


def _nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(5)])


NAMED: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "no tensors": lambda: {"a": [1, 2], "b": "text"},
    "one": lambda: torch.arange(10.0),
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: {"a": torch.empty(0), "b": torch.empty(0, 5), "c": torch.ones(1)},
    "large": lambda: torch.randn(5 << 20),
    "many small": lambda: {f"w{number}": torch.randn(number % 40) for number in range(3000)},
    "trained": _trained,
    "tied": _tied,
    "ordered": lambda: collections.OrderedDict(a=torch.ones(3), b=torch.zeros(3)),
    "parameter": lambda: torch.nn.Parameter(torch.randn(100, 100)),
    "buffers": lambda: [torch.nn.Buffer(torch.randn(5)), torch.nn.Parameter(torch.ones(2), False)],
    "no gradient": lambda: torch.randn(3, requires_grad=True),
    "every type": lambda: [torch.ones(33).to(dtype) for dtype in DTYPES],
    "conjugated": lambda: torch.randn(50, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(50, dtype=torch.complex64).conj().imag,
    "strided": lambda: torch.randn(40, 50)[::2, 1::3],
    "expanded": lambda: torch.ones(1).expand(1000, 1000),
    "channels last": lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "sparse": lambda: torch.eye(300).to_sparse(),
    "compressed": lambda: torch.eye(300).to_sparse_csr(),
    "quantized": _quantized,
    "nested": _nested,
    "meta": lambda: [torch.empty(300, device="meta"), torch.ones(3)],
    "storage": lambda: torch.randn(1000).untyped_storage(),
    "typed storage": lambda: torch.storage.TypedStorage([1.0, 2.0], dtype=torch.float32),
    "subclass": lambda: torch.randn(500).as_subclass(Labelled),
    "attributes": lambda: _with_attribute(torch.randn(30)),
    "module": lambda: torch.nn.Linear(300, 300),
    "made while pickled": lambda: [Reducing(torch.randn(100_000)) for _ in range(4)],
    "record": lambda: Record(torch.randn(9), PurePosixPath("a/b")),
    "large pickle": lambda: {"text": "x" * 5_000_000, "w": torch.randn(700_000)},
    "numbers": lambda: {"list": list(range(100_000)), "w": torch.ones(2)},
    "an archive in an archive": lambda: torch.frombuffer(
        bytearray(b"PK\5\6" * 40), dtype=torch.uint8
    ),
}


def _with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.label = "mine"
    return tensor
