"""Unmodified MindSpore, with `mindio_acp` on its path.

Usage: mindio_mindspore.py save|load DIRECTORY.

MindSpore then writes final names through `create_file`, and renames nothing by itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mindspore as ms
from mindspore.train import serialization

sys.path.append(str(Path(__file__).parents[3]))
from tests.frameworks.workloads import mindspore_checkpoint as ordinary


def goes_through() -> None:
    """Fail unless MindSpore uses the module."""
    import mindio_acp

    assert serialization._ckpt_fs.backend == "mindio", serialization._ckpt_fs.backend
    assert serialization._ckpt_fs.create is mindio_acp.create_file
    assert serialization._ckpt_fs.open is mindio_acp.open_file


def fail_half_way(directory: Path) -> None:
    """A save that fails leaves no file under the final name, and nothing else."""
    whole = serialization._write_parameter_bytes_data
    writes = 0

    def failing(*arguments: object, **named: object) -> object:
        nonlocal writes
        writes += 1
        if writes == 3:
            raise OSError(28, "no room")
        return whole(*arguments, **named)

    serialization._write_parameter_bytes_data = failing
    try:
        ms.save_checkpoint(ordinary.network(6), str(directory / "half.ckpt"))
    except OSError:
        pass
    else:
        raise AssertionError("the save did not fail")
    finally:
        serialization._write_parameter_bytes_data = whole
    assert writes == 3
    assert [path.name for path in directory.iterdir() if "half" in path.name] == []


def main(verb: str, directory: Path) -> None:
    if verb == "save":
        ordinary.save(directory)
        goes_through()
        fail_half_way(directory)
    ordinary.load(directory)
    goes_through()
    assert ms.mindio_preload(str(directory / "net.ckpt")) is True


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
