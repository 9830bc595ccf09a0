"""A thousand simulated members and one coordinator: from a rank's death to the decision, and to the
published name. Not in CI.

    python -m bench.gasp_members [--members 1000] [--processes 4] [--rounds 20] [--no-keep]

*Simulated members*: no torch and no tensors, but a connection with TLS each, and what a member
says. What is measured is the coordinator, TLS and the sockets, with all members on the same
machine. The decision is the moment when the last member has been told SAVE: who writes what, and at
which step. `detected` is the first STOP that any member got.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import tempfile
import time
from pathlib import Path

from bench.record import Report, lower_quartile, median
from tests.training.gasp_job import GaspJob

DECISION_S = 2.0
MEMORY_MB = 200


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
        rss = next(
            int(line.split()[1]) / 1024
            for line in (status / "status").read_text().splitlines()
            if line.startswith("VmHWM")
        )
        killed = time.time()
        os.kill(job.pids[last], signal.SIGKILL)
        survivors = range(world - 1)
        job.members.wait(120)
        assert job.coordinators[0].returncode is None, (
            "not waited for: its times are still to be read"
        )
        told = {
            rank: {line["what"]: line["at"] - killed for line in job.told(rank)}
            for rank in survivors
        }
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


ROWS = {
    "detected": "SIGKILL → the first member is told",
    "all stopped": "SIGKILL → the last member is told to stop",
    "settle": "SIGKILL → the last member is told at which step all meet",
    "decision": "SIGKILL → decision: the last member is told what is written by whom",
    "left": "SIGKILL → the last member is told to leave",
    "coordinator cpu": "processor time of the coordinator for all of that",
    "registered": "start → all members are registered",
}


def report_all(report: Report, rounds: list[dict[str, float]]) -> None:
    """Rows and bars."""
    found = {name: [one[name] for one in rounds] for name in rounds[0]}
    for name, title in ROWS.items():
        report.row(
            title,
            f"{median(found[name]):.3g} s",
            f"{min(found[name]):.3g} s",
            f"{lower_quartile(found[name]):.3g} s",
        )
        report.samples[f"{title}, s"] = found[name]
    report.row(
        "memory of the coordinator, at most", f"{max(found['coordinator MB']):.0f} MB", "", ""
    )
    decision = median(found["decision"])
    memory = max(found["coordinator MB"])
    report.bar(
        f"SIGKILL → decision: ≤ {DECISION_S:g} s", f"{decision:.3g} s", met=decision <= DECISION_S
    )
    report.bar(f"coordinator: ≤ {MEMORY_MB} MB", f"{memory:.0f} MB", met=memory <= MEMORY_MB)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-keep", action="store_true", help="do not write bench/results")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    before = os.getloadavg()[0]
    rounds = []
    for _ in range(given.rounds):
        directory = Path(tempfile.mkdtemp(prefix="acpfs-gasp-"))
        try:
            rounds.append(one(given.members, given.processes, directory / "job"))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    title = f"{given.members} simulated members: from a rank's death to the decision"
    report = Report("gasp_members", title, ["what", "median", "best", "lower quartile"])
    report_all(report, rounds)
    report.notes.append(
        f"{given.rounds} rounds; members in {given.processes} processes, TLS; load average "
        f"before {before:.1f}, "
        f"after {os.getloadavg()[0]:.1f}, of {os.cpu_count()} processors"
    )
    return report.finish(keep=not given.no_keep)


if __name__ == "__main__":
    raise SystemExit(main())
