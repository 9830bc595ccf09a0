"""`init_process_group` without a store finds the generation's, as it would find torchrun's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import rendezvous

_SCHEMES = ("env", "acpfs")


@contextmanager
def rendezvous_by(handler: Callable[..., Iterator[tuple[Any, int, int]]]) -> Iterator[None]:
    """While it is on, `env://`, which is the default, and `acpfs://` lead to this handler: torch
    lets nobody replace one of its own.
    """
    known = rendezvous.__globals__["_rendezvous_handlers"]
    before = {scheme: known.get(scheme) for scheme in _SCHEMES}
    known.update(dict.fromkeys(_SCHEMES, handler))
    try:
        yield
    finally:
        for scheme, old in before.items():
            if old is None:
                known.pop(scheme, None)
            else:
                known[scheme] = old
