"""What frameworks do to old checkpoints when they save, call for call (as traced), without the
frameworks.

Each order is a function of the save_dir, the step, and the bytes of each file; it returns nothing
and keeps no state but the directory's.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

Files = dict[str, bytes]
Order = Callable[[Path, int, Files], None]


def _numbered(save_dir: Path, pattern: str) -> list[Path]:
    found = [
        (int(match[1]), path)
        for path in save_dir.iterdir()
        if (match := re.fullmatch(pattern, path.name))
    ]
    return [path for _number, path in sorted(found)]


def accelerate(save_dir: Path, step: int, files: Files) -> None:
    """save_state with total_limit=1: mkdir, rmtree of the old one, and only then the files."""
    old = _numbered(save_dir, r"checkpoint_(\d+)")
    new = save_dir / f"checkpoint_{step}"
    new.mkdir()
    for path in old:
        shutil.rmtree(path)
    for name, data in files.items():
        (new / name).write_bytes(data)


def trainer(save_dir: Path, step: int, files: Files) -> None:
    """Transformers with save_total_limit=1: the old one goes right after the last close."""
    new = save_dir / f"checkpoint-{step}"
    new.mkdir()
    for name, data in files.items():
        (new / name).write_bytes(data)
    for path in _numbered(save_dir, r"checkpoint-(\d+)")[:-1]:
        shutil.rmtree(path)


def mindspore(save_dir: Path, step: int, files: Files) -> None:
    """ModelCheckpoint with keep_checkpoint_max=1: chmod and unlink of the old file, then the new
    one under a temporary name.
    """
    for path in _numbered(save_dir, r"net-1_(\d+)\.ckpt"):
        path.chmod(0o200)
        path.unlink()
    data = b"".join(files.values())
    temporary = save_dir / f"net-1_{step}.ckpt.tmp"
    final = save_dir / f"net-1_{step}.ckpt"
    with temporary.open("ab") as file:
        for start in range(0, len(data), 1 << 16):
            file.write(data[start : start + (1 << 16)])
    temporary.rename(final)
    final.chmod(0o400)


def lightning(save_dir: Path, step: int, files: Files) -> None:
    """ModelCheckpoint with save_top_k=1: written elsewhere and copied in place, then the one that
    it replaces is unlinked.
    """
    final = save_dir / f"epoch=0-step={step}.ckpt"
    with final.open("wb") as file:
        file.write(b"".join(files.values()))
    os.utime(final)
    final.chmod(0o644)
    for path in _numbered(save_dir, r"epoch=0-step=(\d+)\.ckpt")[:-1]:
        path.unlink()


def same_name(save_dir: Path, step: int, files: Files) -> None:
    """Home-made: the directory of the newest checkpoint is always called the same, removed and made
    anew.
    """
    new = save_dir / "checkpoint-1"
    if new.exists():
        shutil.rmtree(new)
    new.mkdir()
    for name, data in files.items():
        (new / name).write_bytes(data)


ORDERS: tuple[Order, ...] = (accelerate, trainer, mindspore, lightning)


def expected(order: Order, step: int, files: Files) -> Files:
    """What a whole checkpoint of that step is: path below the save_dir → bytes."""
    named: dict[Order, str] = {
        accelerate: f"checkpoint_{step}",
        trainer: f"checkpoint-{step}",
        same_name: "checkpoint-1",
    }
    directory = named.get(order)
    if directory is not None:
        return {f"{directory}/{name}": data for name, data in files.items()}
    name = f"net-1_{step}.ckpt" if order is mindspore else f"epoch=0-step={step}.ckpt"
    return {name: b"".join(files.values())}
