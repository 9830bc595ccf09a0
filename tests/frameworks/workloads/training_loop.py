"""A training loop that saves, rotates, dies and goes on.

Usage: training_loop.py DIRECTORY STEPS [DIE_AT].

Every third step a directory `checkpoint-STEP` with model, optimizer and random state, then the
tracker file `latest`; the two newest stay. With DIE_AT it kills itself with SIGKILL after that
step. At the end it prints a checksum of all weights, moments and random state.
"""

import hashlib
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

EVERY = 3
LIMIT = 2
WIDTH = 512
BATCH = 16
top = Path(sys.argv[1])
steps = int(sys.argv[2])
die_at = int(sys.argv[3]) if len(sys.argv) > 3 else -1

torch.set_num_threads(1)
torch.manual_seed(7)
model = torch.nn.Sequential(
    torch.nn.Linear(WIDTH, WIDTH),
    torch.nn.Dropout(0.2),
    torch.nn.ReLU(),
    torch.nn.Linear(WIDTH, WIDTH),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def save(step: int) -> None:
    directory = top / f"checkpoint-{step}"
    directory.mkdir()
    torch.save(model.state_dict(), directory / "model.pt")
    torch.save(optimizer.state_dict(), directory / "optimizer.pt")
    torch.save({"rng": torch.get_rng_state(), "step": step}, directory / "state.pt")
    (top / "latest").write_text(directory.name)
    kept = sorted(top.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    for old in kept[:-LIMIT]:
        shutil.rmtree(old)


def load() -> int:
    if not (top / "latest").exists():
        return 0
    directory = top / (top / "latest").read_text()
    model.load_state_dict(torch.load(directory / "model.pt"))
    optimizer.load_state_dict(torch.load(directory / "optimizer.pt"))
    state = torch.load(directory / "state.pt")
    torch.set_rng_state(state["rng"])
    return int(state["step"])


first = load()
print("from", first)
for step in range(first + 1, steps + 1):
    batch = torch.randn(BATCH, WIDTH)
    loss = (model(batch) - batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % EVERY == 0:
        save(step)
    if step == die_at:
        os.kill(os.getpid(), signal.SIGKILL)
digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
for parameter in model.parameters():
    for tensor in (
        parameter,
        optimizer.state[parameter]["exp_avg"],
        optimizer.state[parameter]["exp_avg_sq"],
    ):
        digest.update(tensor.detach().numpy().tobytes())
print(digest.hexdigest())
