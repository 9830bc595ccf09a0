"""A rank's host state on another rank: sent before the gate of each update, so that whoever passes
it knows that all have theirs.

Both exchanges of a step go over the gate's own group. A state that outgrew what was agreed is not
sent, and the rank that has it is then replaced without its random numbers.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist

from acpfs.training.host_state import Taken

KEPT = 2
SPARE_BYTES = 4096
_LENGTH_BYTES = 8


def packed(taken: Taken) -> bytes:
    written = io.BytesIO()
    _OnHost(written, protocol=pickle.HIGHEST_PROTOCOL).dump(taken)
    return written.getvalue()


class _OnHost(pickle.Pickler):
    """Tensors of a device come from the host's memory: another rank's device has another number."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def unpacked(data: bytes) -> Taken:
    """What another rank of this job packed."""
    # as all_gather_object does: it came over the job's own process groups
    found = pickle.loads(data)  # noqa: S301
    assert isinstance(found, Taken)
    return found


class Buddy:
    """Keeps the state of one other rank, across generations."""

    def __init__(self, rank: int, world: int) -> None:
        self._to = (rank + world // 2) % world
        self.of = (rank - world // 2) % world
        self._alone = world == 1
        self._size = 0
        self._group: Any = None
        self.kept: dict[int, bytes] = {}

    def meet(self, group: Any, first: bytes) -> None:
        """In a new generation; all agree how long a state may be. A collective."""
        longest = torch.tensor([len(first)], dtype=torch.int64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
        self._group = group
        self._size = _LENGTH_BYTES + int(longest.item()) * 5 // 4 + SPARE_BYTES

    def exchange(self, step: int, data: bytes) -> None:
        """Returns when both have come."""
        if self._alone:
            return
        fits = len(data) <= self._size - _LENGTH_BYTES
        out = torch.zeros(self._size, dtype=torch.uint8)
        head = (len(data) if fits else 0).to_bytes(_LENGTH_BYTES, "little") + (
            data if fits else b""
        )
        out[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        found = torch.empty_like(out)
        works = [
            dist.isend(out, self._to, group=self._group),
            dist.irecv(found, self.of, group=self._group),
        ]
        for work in works:
            work.wait()
        text = found.numpy().tobytes()
        length = int.from_bytes(text[:_LENGTH_BYTES], "little")
        if length:
            self.kept[step] = text[_LENGTH_BYTES : _LENGTH_BYTES + length]
        for old in sorted(self.kept)[:-KEPT]:
            del self.kept[old]

    def begin(self, step: int, data: bytes) -> None:
        """The generation begins at `step`: what was kept of others is void."""
        self.exchange(step, data)
        self.kept = {kept: value for kept, value in self.kept.items() if kept == step}
