"""Writes records that have one function each which writes them: of a supervisor, a bypassed mount,
an emergency save, a job. In a process of the version that leaves them; `leave.py` calls it.

    PYTHONPATH=CODE python tests/formats/leave_words.py TARGET

Imports acpfs and nothing of the tests, which may be of another version.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from acpfs.supervisor import fallthrough
from acpfs.supervisor.mount_state import MountState
from acpfs.training.coordinator.faults_log import behind, note_fault
from acpfs.training.coordinator.witness import Claimant, claim
from acpfs.training.manifest import write_manifest
from acpfs.training.messages import Goodbye, Header, Manifest, SavedFile, Sent, encode

JOB = "run-0123"
WAIT_S = 60.0
SETTINGS = {"backing": "/shared/left", "mountpoint": "/mnt/left", "ram": 64 << 20}
GASP = Manifest(
    "run-0123",
    2,
    7,
    (3,),
    {"0": 1},
    (SavedFile("shard-0.pt", 5, "0" * 32),),
    {"0": "1" * 32},
    ("node-a",),
    {"1": {0: "2" * 32}},
)
BYPASSED = fallthrough.BypassedMount("/mnt/left", "/shared/left", 7, 1.5, "asked for", 3, 4)
CLAIMANT = Claimant(0, 2, majority=True)


def leave(target: Path) -> None:
    """All of them."""
    state = MountState(SETTINGS, facts={"lanes": ["direct"]}, workers=2)
    (target / "supervisor.json").write_text(json.dumps(state.record()))
    fallthrough._write(target, BYPASSED)
    (target / "gasp").mkdir()
    write_manifest(target / "gasp", GASP)
    (target / "message.json").write_bytes(encode(Sent(Header(JOB, 1, 2, "rank 3"), Goodbye())))
    job = target / ".acpfs-job" / JOB
    coordinator = [sys.executable, "-m", "acpfs.training.coordinator", str(target), "--first"]
    words = ["--job", JOB, "--number", "0", "--node", "node-a", "--witness", "off"]
    with subprocess.Popen([*coordinator, *words], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline(), "it does not begin"
        process.kill()
    claim(job, 1, CLAIMANT)
    note_fault(job, {"lost": {"3": "node-a"}, "step": 7})
    assert behind.wait(WAIT_S)


if __name__ == "__main__":
    leave(Path(sys.argv[1]))
