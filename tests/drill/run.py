"""A whole drill: blocks of cycles in processes of their own, several at a time, until there were
enough kills or the time is up.

Workloads, transports and kinds of stands take turns; what each block does follows from the seed. A
block that says nothing for long is ended and is a loss: something hangs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from acpfs.descriptors import readable
from tests.drill.block import Block
from tests.drill.result import Result
from tests.drill.stand import nameless
from tests.drill.workloads import WORKLOADS
from tests.rig.mounts import REPOSITORY, mounts_below

SILENCE_S_MAX = 240.0
CLEAN_ROUNDS_MAX = 100
CYCLES = {
    "disk": 12,
    "power": 6,
    "server": 8,
    "gluster": 8,
    "moosefs": 8,
    "move": 12,
    "spill fails": 8,
    "mirror": 10,
    "guard": 10,
    "large": 10,
    "large guard": 10,
}


@dataclass
class Plan:
    """What a drill consists of."""

    seed: int
    kills: int
    minutes: float
    parallel: int = 2
    kinds: list[str] = field(default_factory=lambda: ["disk", "power", "disk", "server"])
    workloads: list[str] = field(default_factory=lambda: list(WORKLOADS))
    transports: list[str] = field(
        default_factory=lambda: ["native", "native-direct", "native-passthrough", "libfuse"]
    )
    only: list[str] = field(default_factory=list)
    mutant: str = ""
    torch: bool = False
    cycles: int = 0
    """Per block; 0: as many as is usual for its kind."""
    silence_s: float = SILENCE_S_MAX
    """A block that says nothing for so long hangs, and that is a loss."""

    def blocks(self) -> Iterator[Block]:
        """For ever; each kind over each workload, then again with other seeds and transports."""
        chooser = random.Random(self.seed)
        while True:
            turns = list(itertools.product(self.kinds, self.workloads))
            chooser.shuffle(turns)
            for kind, workload in turns:
                yield self._block(kind, workload, chooser)

    def _block(self, kind: str, workload: str, chooser: random.Random) -> Block:
        options: dict[str, object] = {"fsync": "durable"} if chooser.random() < 0.2 else {}
        options |= {"verify_after_write": True} if chooser.random() < 0.2 else {}
        return Block(
            kind,
            workload,
            chooser.choice(self.transports),
            chooser.randrange(1 << 30),
            "",
            self.cycles or CYCLES[kind],
            self.mutant,
            torch=self.torch and workload == "torch.save",
            only=self.only,
            options=options,
        )


class Drill:
    """Runs a plan."""

    def __init__(
        self, plan: Plan, tell: Callable[[str], None], *, until_loss: bool = False
    ) -> None:
        """`tell` gets a line about each cycle; `until_loss`: the first loss is the end."""
        self._until_loss = until_loss
        self.plan = plan
        self.result = Result(
            plan.seed, **{k: v for k, v in asdict(plan).items() if k != "seed" and v}
        )
        self._tell = tell
        self._blocks = plan.blocks()
        self._lock = threading.Lock()
        self._deadline = time.monotonic() + plan.minutes * 60
        self._base = Path(tempfile.mkdtemp(prefix="drill-"))
        self._number = 0
        self.copies = 0
        """Files that lay in spill directories when something died, as seen from outside."""

    def run(self) -> Result:
        """Until done."""
        threads = [threading.Thread(target=self._work) for _ in range(self.plan.parallel)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self._deadline = 0.0
            for thread in threads:
                thread.join()
            shutil.rmtree(self._base, ignore_errors=True)
        if self.copies:
            self.result.remarks.append(
                f"{self.copies} copies lay in the spill directories when something died."
            )
        return self.result

    @property
    def _done(self) -> bool:
        enough = self.result.kills >= self.plan.kills or (
            self._until_loss and bool(self.result.losses)
        )
        return enough or time.monotonic() > self._deadline

    def _work(self) -> None:
        while not self._done:
            with self._lock:
                block = next(self._blocks)
                self._number += 1
                block.base = str(self._base / f"block{self._number}")
            self._run(block)

    def _run(self, block: Block) -> None:
        with open(self._base / "blocks.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.drill.block", json.dumps(asdict(block))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={
                    **os.environ,
                    "PYTHONPATH": str(REPOSITORY),
                    "ACPFS_STARTED_BELOW": block.base,
                },
                start_new_session=True,
            )
        assert process.stdout is not None
        with process.stdout as lines:
            while readable(lines, self.plan.silence_s) and (line := lines.readline()):
                self._note(block, json.loads(line))
                if self._done:
                    break
            else:
                if process.poll() is None and not line_ended(process):
                    self._lost(block, "the block says nothing any more: something hangs")
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        if process.wait() not in (0, -signal.SIGTERM):
            self._lost(
                block,
                f"the block ended with {process.returncode}: "
                f"{(self._base / 'blocks.log').read_text()[-1500:]}",
            )
        clean_up(Path(block.base))

    def _note(self, block: Block, found: dict[str, object]) -> None:
        fault = str(found["fault"])
        killed = list(found["killed"])  # type: ignore[call-overload]
        losses = [nameless(loss) for loss in list(found["losses"])]  # type: ignore[call-overload]
        where: dict[str, Any] = {
            "transport": block.transport,
            "block": {**asdict(block), "base": ""},
            "cycle": found["cycle"],
        }
        self.copies += int(str(found["copies"]))
        for number, point in enumerate(killed):
            self.result.note(
                fault, block.workload, losses if number == 0 else [], point=point, **where
            )
        self.result.note_writing(block.kind, list(found["writing"]))  # type: ignore[call-overload]
        if found["instants"]:
            self.result.note(
                f"{fault}, instants", block.workload, [], times=int(str(found["instants"]))
            )
        self._tell(
            f"{fault} × {block.workload} × {block.transport}: {', '.join(killed)}"
            + "".join(f"\n  LOST {loss}" for loss in losses)
        )

    def _lost(self, block: Block, loss: str) -> None:
        self.result.note("?", block.workload, [loss], block=asdict(block))
        self._tell(f"LOST {loss}")


def line_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process closes its output because it ends."""
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        return False
    return True


def clean_up(base: Path) -> None:
    """Whatever a block that was ended has left: processes that it started, mounts below its
    directory.
    """
    for _round in range(
        CLEAN_ROUNDS_MAX
    ):  # a worker that has lost its supervisor starts another one
        if not end_processes(f"ACPFS_STARTED_BELOW={base}".encode()):
            break
        select.select([], [], [], 0.05)
    for mounted in mounts_below(base):
        subprocess.run(["umount", "-l", str(mounted)], check=False, timeout=60)
    shutil.rmtree(base, ignore_errors=True)


def end_processes(marker: bytes) -> int:
    """Kill those that have it in their environment; how many there were."""
    ended = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if marker in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
                    ended += 1
    return ended
