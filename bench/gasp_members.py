"""A thousand simulated members and one coordinator: from a rank's death to the decision, and to the published name. Not in CI.

    python -m bench.gasp_members [--members 1000] [--processes 4] [--rounds 9]

Members have no torch and no tensors: what is measured is the coordinator, TLS and the sockets, on one machine. The decision is the
moment when the last member has been told SAVE. `detected` is the first STOP that any member got.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import statistics
import tempfile
import time
from pathlib import Path

from tests.training.gasp_job import GaspJob


def one(members: int, processes: int, directory: Path) -> dict[str, float]:
    """One job: its last rank, a process of its own, is killed."""
    each = -(-members // processes)
    world = each * processes + 1
    holders = {f"opt{n}": tuple(range(n, world, 64)) for n in range(64)}
    began = time.monotonic()
    with GaspJob(directory, world, holders, ranks_per_process=each) as job:
        last = max(job.pids)
        while job.status()["state"] != "running":
            time.sleep(0.5)
        time.sleep(1)  # what registering left to do
        registered = time.monotonic() - began
        status = Path(f"/proc/{job.coordinators[0].pid}")
        before = cpu_s(status)
        rss = next(int(line.split()[1]) / 1024 for line in (status / "status").read_text().splitlines() if line.startswith("VmHWM"))
        killed = time.time()
        os.kill(job.pids[last], signal.SIGKILL)
        survivors = range(world - 1)
        job.members.wait(120)
        assert job.coordinators[0].returncode is None, "not waited for: its times are still to be read"
        told = {rank: {line["what"]: line["at"] - killed for line in job.told(rank)} for rank in survivors}
        return {
            "registered": registered,
            "detected": min(times["Stop"] for times in told.values()),
            "all stopped": max(times["Stop"] for times in told.values()),
            "settle": max(times["Settle"] for times in told.values()),
            "decision": max(times["Save"] for times in told.values()),
            "left": max(times["Left"] for times in told.values()),
            "coordinator cpu": cpu_s(status) - before,
            "coordinator MB": rss,
        }


def cpu_s(process: Path) -> float:
    """User and system time."""
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    rounds = []
    for _ in range(given.rounds):
        directory = Path(tempfile.mkdtemp(prefix="acpfs-gasp-"))
        try:
            rounds.append(one(given.members, given.processes, directory / "job"))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        print(json.dumps({name: round(value, 3) for name, value in rounds[-1].items()}), flush=True)
    print(f"{'':16} {'best':>8} {'quartile':>8} {'median':>8}   load {os.getloadavg()[0]:.1f}")
    for name in rounds[0]:
        values = sorted(found[name] for found in rounds)
        print(f"{name:16} {values[0]:8.3f} {values[len(values) // 4]:8.3f} {statistics.median(values):8.3f}")


if __name__ == "__main__":
    main()
