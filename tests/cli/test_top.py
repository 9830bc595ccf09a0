"""`acpfs-ctl top`: what the screen says, and keys that ask before they do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Any

import trio
from textual.pilot import Pilot
from textual.widgets import DataTable

from acpfs.cli.top_screen import TopScreen, summary
from tests.control.double import DoubleSubject

PATIENCE_S = 60.0


def status() -> dict[str, Any]:
    async def make() -> dict[str, Any]:
        subject = DoubleSubject()
        subject.ops = [(1, "run/[bold]a", 5, True), (2, "run/b", 7, False)]
        found: dict[str, Any] = subject.status().to_json()
        return found

    return trio.run(make)


CHECKPOINT = {
    "path": "run/step-1", "state": "persisted", "bytes": 1024, "save_s": 2.0, "persist_s": None, "loads_from": "ram",
}  # fmt: skip


class Daemon:
    """Answers from what the test has put into it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.status = status()
        self.broken = ""

    def ask(self, verb: str, args: dict[str, Any]) -> Any:
        if self.broken:
            raise ConnectionError(self.broken)
        if verb == "status":
            return self.status
        if verb == "checkpoints":
            return {"items": [CHECKPOINT]}
        self.asked.append((verb, args))
        return {}


async def until(pilot: Pilot[None], condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await pilot.pause(0.02)


def test_the_summary_says_what_is_wrong_and_who_waits() -> None:
    found = status()
    found["waiting"] = [{"path": "run/c", "pid": 7, "command": "python", "wanted_bytes": 1 << 20, "since": time.time() - 5}]
    found["cluster"] = {"live": 1, "nodes": 2, "waiting": [], "missing": ["n2"]}
    text = summary(found, 2048.0)
    assert "2.0 KiB/s; storage ok" in text
    assert "2 operations, 12 B; the oldest is 1.5 s old" in text
    assert "WRONG    1 refused for good; n2 is missing" in text
    assert "waits    python for 1.0 MiB (run/c)" in text
    found |= {"queue_length": 0, "parked": 0, "cluster": None}
    assert "nothing: all is persisted" in summary(found, None)
    assert "WRONG" not in summary(found, None)


def test_keys_ask_before_they_do() -> None:
    daemon = Daemon()
    app = TopScreen("/mnt/x", daemon.ask, 0.2)

    async def scenario() -> None:
        async with app.run_test(size=(120, 40)) as pilot:
            queue = app.query_one("#queue", DataTable)
            await until(pilot, lambda: queue.row_count == 2)
            assert str(queue.get_row_at(0)[0]) == "run/[bold]a"
            await pilot.press("t", "n", "y")
            assert daemon.asked == []
            for key, verb, args in (
                ("t", "retry", {"paths": ["run/[bold]a"]}),
                ("f", "flush", {"paths": []}),
                ("p", "pin", {"paths": ["run/step-1"]}),
                ("r", "release", {"paths": []}),
            ):
                await pilot.press(key, "y")
                await until(pilot, lambda verb=verb, args=args: (verb, args) in daemon.asked)
            assert len(daemon.asked) == 4
            daemon.broken = "the worker is being replaced"
            await until(pilot, lambda: "no answer: the worker is being replaced" in app.told)
            daemon.broken = ""
            daemon.status = daemon.status | {"queue": []}
            await until(pilot, lambda: queue.row_count == 0)

    asyncio.run(scenario())


def test_other_commands_do_not_load_it() -> None:
    code = "import sys; import acpfs.cli.ctl, acpfs.cli.verbs.status, acpfs.cli.verbs.top; sys.exit('textual' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S).returncode == 0
