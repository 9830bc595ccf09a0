"""Digests of a rank's tensors: copies that are equal bit for bit have equal ones. Any thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from acpfs.checksum import Checksum


def digest_of(values: Mapping[str, Any]) -> str:
    """xxh3-128 over values in the order of their names."""
    digest = Checksum()
    for name, value in sorted(values.items()):
        digest.update(f"{name}\0".encode())
        for piece in _bytes_of(value):
            digest.update(piece)
    return digest.hexdigest()


def _bytes_of(value: Any) -> Iterator[Any]:
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        plain = value.detach().to("cpu").contiguous().reshape(-1)
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        if plain.numel():
            yield memoryview(plain.view(torch.uint8).numpy())
    else:
        yield repr(value).encode()
