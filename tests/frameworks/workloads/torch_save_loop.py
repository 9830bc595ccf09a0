"""torch.save in a loop until a line comes on standard input; each file is loaded again.

Usage: torch_save_loop.py DIRECTORY.
"""

import select
import sys
from pathlib import Path

import torch

top = Path(sys.argv[1])
step = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    state = {"step": step, "weights": torch.arange(step, step + (1 << 20), dtype=torch.float32)}
    torch.save(state, top / f"step-{step % 4}.pt")
    (top / "latest").write_text(str(step))
    loaded = torch.load(top / f"step-{step % 4}.pt")
    assert loaded["step"] == step
    assert torch.equal(loaded["weights"], state["weights"])
    print(step, flush=True)
    step += 1
