"""`mindio_acp` with torch: saves, names, loads, and what the product saved.

Usage: mindio_torch.py DIRECTORY; PYTHONPATH as for scripts.
"""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import mindio_acp
import torch

sys.path.append(str(Path(__file__).parents[3]))
from tests.compatible.containers import container_of, plain_bytes


def state(seed: int) -> dict[str, object]:
    values = torch.Generator().manual_seed(seed)
    weight = torch.randn(512, 256, generator=values)
    return {
        "weight": weight,
        "row": weight[3],
        "half": weight.half(),
        "step": seed,
        "names": ["a", "b"],
    }


def same(left: dict[str, object], right: dict[str, object]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(value, right[name]) if isinstance(value, torch.Tensor) else value == right[name]
        for name, value in left.items()
    )


def main(directory: Path) -> None:
    in_mount = 2 if os.environ.get("ACPFS_PLACE") == "plain" else 1
    first = str(directory / "model.pt")
    elsewhere = Path(os.environ.get("TMPDIR", "/tmp")) / f"mindio-{os.getpid()}.pt"
    assert mindio_acp.save(state(1), first) == in_mount
    assert mindio_acp.save(state(2), first) == in_mount
    assert mindio_acp.save(state(2), str(elsewhere)) == 2
    elsewhere.unlink()
    assert mindio_acp.save({"lock": __import__("threading").Lock()}, first) == -1, (
        "cannot be pickled"
    )
    assert mindio_acp.save(state(2), str(directory / "none" / "model.pt")) == -1
    assert same(mindio_acp.load(first), state(2))
    assert same(torch.load(first, mmap=True), state(2)), "a plain torch file"
    names = [str(directory / f"rank-{rank}.pt") for rank in range(3)]
    assert mindio_acp.multi_save(state(3), names) == in_mount
    assert mindio_acp.multi_save(state(4), names) == in_mount
    assert {os.stat(name).st_ino for name in names} == {os.stat(names[0]).st_ino}
    assert all(same(mindio_acp.load(name, map_location="cpu"), state(4)) for name in names)
    assert (
        mindio_acp.multi_save(state(4), []),
        mindio_acp.multi_save(state(4), [str(directory / "none" / "a")]),
    ) == (None, None)
    helper = mindio_acp.CheckpointHelper(0)
    helper.save_model_checkpoint(str(directory / "helper.pt"), state(5))
    helper.save_optimizer_checkpoint(
        [str(directory / "optimizer.pt")], lambda notify_callback: state(6)
    )
    helper.save_optimizer_checkpoint(str(directory / "nothing.pt"), lambda: None)
    helper.async_save_checkpoint(
        mindio_acp.save, {"obj": state(7), "path": str(directory / "later.pt")}
    )
    helper.wait_d2h_finished()
    loaded = [
        helper.load_model_checkpoint(str(directory / f"{name}.pt"), 0)
        for name in ("helper", "optimizer", "later")
    ]
    assert all(same(found, state(5 + number)) for number, found in enumerate(loaded))
    of_the_product(directory)
    left = [path.name for path in directory.iterdir() if path.name.endswith(".tmp")]
    assert left == [], left


def of_the_product(directory: Path) -> None:
    """A file in its format has the same records as torch's zip."""
    torch.save(state(8), directory / "zip.pt")
    with zipfile.ZipFile(directory / "zip.pt") as archive:
        names = {info.filename.split("/", 1)[1]: info for info in archive.infolist()}
        records = {
            name: archive.read(info)
            for name, info in names.items()
            if name == "data.pkl" or name.startswith("data/")
        }
    old = directory / "old.pt"
    new = directory / "new.pt"
    old.write_bytes(container_of(records))
    assert same(mindio_acp.load(str(old)), state(8))
    assert mindio_acp.convert(str(old), str(new)) == 0
    assert same(torch.load(new), state(8))
    assert same(torch.load(new, mmap=True), state(8))
    (directory / "bytes.pt").write_bytes(plain_bytes(b"plain"))
    assert mindio_acp.load(str(directory / "bytes.pt")) == b"plain"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
