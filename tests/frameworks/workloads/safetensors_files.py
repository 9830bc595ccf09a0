"""safetensors save and load, also over a file that is mapped.

Usage: safetensors_files.py DIRECTORY.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """48 MiB."""
    generator = torch.Generator().manual_seed(seed)
    return {f"w{n}": torch.randn(1024, 1024, generator=generator) for n in range(12)} | {
        "b": torch.ones(3)
    }


def main(directory: Path) -> None:
    """Temporary file, ftruncate, write, rename, close, chmod: all done by the library."""
    path = directory / "model.safetensors"
    save_file(tensors(1), path, metadata={"format": "pt"})
    first = load_file(path)
    with safe_open(path, framework="pt") as file:
        assert torch.equal(file.get_slice("w3")[:10], tensors(1)["w3"][:10])
    save_file(tensors(2), path)
    assert all(torch.equal(first[name], value) for name, value in tensors(1).items())
    assert all(torch.equal(load_file(path)[name], value) for name, value in tensors(2).items())
    assert [p.name for p in directory.iterdir()] == [path.name]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
