"""What one step costs with and without the look at the end of its update.

Started by `bench.end_mark` with torch's interpreter.

    TORCH_PYTHON -m bench.end_mark_steps LIBRARIES CONFIG

CONFIG is JSON: `layers`, `width`, `sequence`, `rounds`. The result is JSON on stdout: milliseconds
by kind, and `parameters`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.append(sys.argv[1])  # behind its own: only what is missing there comes from here

import torch

from acpfs.training.torch.digest import digest_of
from acpfs.training.torch.end_mark import EndDigest, EndMark

WARM_STEPS = 3
"""Behind the first two updates digests are compared, too: that is over then."""
HEADS = 16
Part = Callable[[], object]


class Loop:
    """A transformer with Adam."""

    def __init__(self, layers: int, width: int, sequence: int) -> None:
        torch.manual_seed(7)
        layer = torch.nn.TransformerEncoderLayer(width, HEADS, 4 * width, 0.0, batch_first=True)
        self.model: Any = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(1, sequence, width)

    def gradients(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()

    def live(self) -> Any:
        """As a rank's shards are given to the mark."""
        return {
            "all": {
                name: {"": value, **self.optimizer.state.get(value, {})}
                for name, value in self.model.named_parameters()
            }
        }

    def copied(self) -> dict[str, Any]:
        """As a script's `state=` gives it that makes copies."""
        return {
            f"{name}/{key}": value.detach().clone()
            for name, values in self.live()["all"].items()
            for key, value in values.items()
        }


def timed(part: Part) -> float:
    begun = time.perf_counter()
    part()
    return 1000 * (time.perf_counter() - begun)


def main() -> None:
    config = json.loads(sys.argv[2])
    loop = Loop(config["layers"], config["width"], config["sequence"])
    mark = EndMark(loop.live, 0)
    changed = EndMark(loop.live, 1 << 40, is_told=True)
    digest = EndDigest(lambda: {"all": digest_of(loop.copied())})
    found: dict[str, list[float]] = {}
    for number in range(WARM_STEPS + config["rounds"]):
        step = timed(loop.gradients)
        look = timed(mark.look)
        step += timed(loop.optimizer.step)
        # as behind an update of a loop that changes parameters
        changed._kept_for = 1  # noqa: SLF001
        parts = {
            "mark": look + timed(mark.note),
            "mark_and_copy": timed(changed.note),
            "digest_of_copies": timed(digest.note),
            "copies_alone": timed(loop.copied),
            "step": step,
        }
        if number >= WARM_STEPS:
            for name, took in parts.items():
                found.setdefault(name, []).append(took)
    size = sum(value.numel() for value in loop.model.parameters())
    print(json.dumps({"parameters": size, "times": found}))


main()
