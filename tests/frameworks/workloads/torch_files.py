"""torch.save and torch.load in all their forms. Usage: torch_files.py CASE DIRECTORY."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

State = dict[str, torch.Tensor]


def state(seed: int) -> State:
    """A state_dict of 96 MiB: large tensors, small ones, an empty one, and shared storage."""
    generator = torch.Generator().manual_seed(seed)
    big = torch.randn(4, 1024, 1024, generator=generator)
    tensors = {f"layer.{n}.weight": torch.randn(1024, 1024, generator=generator) for n in range(20)}
    tensors |= {f"layer.{n}.bias": torch.randn(7, generator=generator) for n in range(200)}
    return tensors | {
        "big": big,
        "view": big[1:3],
        "empty": torch.empty(0),
        "half": big[0].to(torch.bfloat16),
    }


def same(a: State, b: State) -> None:
    """Fail unless two state_dicts are equal, bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


def zip_format(path: Path) -> None:
    """The default format, loaded back plainly and with weights_only off."""
    torch.save(state(1), path)
    same(torch.load(path), state(1))
    same(torch.load(path, weights_only=False), state(1))


def file_object(path: Path) -> None:
    """Through a Python file object, whose writes are other ones."""
    with path.open("wb") as file:
        torch.save(state(2), file)
    with path.open("rb") as file:
        same(torch.load(file), state(2))


def legacy(path: Path) -> None:
    """The format before 1.6."""
    torch.save(state(3), path, _use_new_zipfile_serialization=False)
    same(torch.load(path), state(3))


def mapped(path: Path) -> None:
    """mmap=True, used after the file was replaced in place of its name: a mapping keeps the bytes
    it was made of.
    """
    torch.save(state(4), path)
    loaded = torch.load(path, mmap=True, weights_only=True)
    other = path.with_name("replacement")
    torch.save(state(5), other)
    other.replace(path)
    same(loaded, state(4))
    same(torch.load(path, mmap=True), state(5))


def overwritten(path: Path) -> None:
    """Saved again and again under one name, as many loops do: open with O_TRUNC each time."""
    for seed in range(6):
        torch.save(state(seed), path)
    same(torch.load(path), state(5))


def rotated(path: Path) -> None:
    """The newest two of six checkpoints are kept, the others deleted at once."""
    names = [path.with_name(f"step-{step}.pt") for step in range(6)]
    for step, name in enumerate(names):
        torch.save(state(step), name)
        if step >= 2:
            names[step - 2].unlink()
    same(torch.load(names[4]), state(4))
    same(torch.load(names[5]), state(5))


CASES: dict[str, Callable[[Path], None]] = {
    "zip": zip_format,
    "file-object": file_object,
    "legacy": legacy,
    "mmap": mapped,
    "overwrite": overwritten,
    "rotate": rotated,
}

if __name__ == "__main__":
    CASES[sys.argv[1]](Path(sys.argv[2]) / "model.pt")
