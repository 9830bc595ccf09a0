"""`acpfs-ctl top`: what the screen says, and keys that ask before they do."""

from __future__ import annotations

import asyncio
import html
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import trio
from textual.pilot import Pilot
from textual.widgets import DataTable, Static
from textual.widgets._footer import FooterKey

from acpfs.cli import show
from acpfs.cli.top_screen import (
    CHECKPOINTS,
    MARGINS,
    OWNERS_MAX,
    QUEUE,
    Mount,
    TopScreen,
    checkpoint_rows,
    drained_bytes,
    members_worst_first,
    mount_row,
    summary,
    wrong,
)
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
    "path": "run/step-1",
    "state": "persisted",
    "bytes": 1024,
    "save_s": 2.0,
    "persist_s": None,
    "loads_from": "ram",
    "began_at": 100.0,
    "closed_at": 102.0,
    "persisted_at": None,
}


def member(node: str, state: str, lag_s: float | None = None) -> show.Json:
    figures = {
        "operations": 3,
        "dirty_bytes": 4096,
        "silent_s": 2.0,
        "clock_bound_s": 0.1,
        "clock_ahead_s": (None, None),
    }
    return {
        "node": node,
        "state": state,
        "host": f"host-of-{node}",
        "lag_s": lag_s,
        "errors": [],
        **figures,
    }


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
        if verb == "nodes":
            return {"nodes": [member("this", "this"), member("n7", "missing")]}
        self.asked.append((verb, args))
        return {}


async def until(pilot: Pilot[None], condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await pilot.pause(0.02)


def test_the_summary_says_what_is_wrong_and_who_waits() -> None:
    found = status()
    found["waiting"] = [
        {
            "path": "run/c",
            "pid": 7,
            "command": "python",
            "wanted_bytes": 1 << 20,
            "since": time.time() - 5,
        }
    ]
    found["cluster"] = {"live": 1, "nodes": 2, "waiting": [], "missing": ["n2"]}
    text = summary(found, 2048.0)
    assert "2.0 KiB/s; storage ok" in text
    assert "2 operations, 12 B; the oldest is 1.5 s old" in text
    assert "WRONG    1 refused for good; n2 is missing" in text
    assert "waits    python for 1.0 MiB (run/c)" in text
    found |= {"queue_length": 0, "parked": 0, "cluster": None}
    assert "nothing: all is persisted" in summary(found, None)
    assert "WRONG" not in summary(found, None)


@pytest.mark.clause("S603")
def test_the_summary_says_where_the_copy_is_and_of_whom_something_is_held() -> None:
    found = status()
    copies = {"state": "on", "holder": "n7", "why": None, "taken_over_by": None}
    found["copies"] = {**copies, "behind_files": 0, "behind_bytes": 0, "pending": 0, "until": None}
    one = {"node": "n3", "bytes": 4096, "silent_s": 1.0, "claimed": True, "adoption": None}
    found["held"] = [{**one, "node": f"n{number}"} for number in range(3, 9)]
    lines = summary(found, None).splitlines()
    assert "copies   1 of 1 at n7, on; nothing would be lost with this node" in lines
    assert "held     4.0 KiB of n3, heard of 1.0 s ago, claimed" in lines
    assert len([line for line in lines if line.startswith("held")]) == 3


def test_the_rate_counts_what_is_on_its_way() -> None:
    """A file of a gigabyte is persisted in one moment, after minutes in which the drain ran."""
    found = status()
    found["counters"] = {"persisted_bytes": 100}
    for entry in found["queue"]:
        entry["streamed_bytes"] = 5
    assert drained_bytes(found) == 100 + 5 * len(found["queue"])


def words_of(bindings: Any) -> list[str]:
    return [f"{binding.key} {binding.description}" for binding in bindings if binding.show]


def test_documents_show_the_screen_as_it_is() -> None:
    """The text in OPERATIONS and the picture have its headings, keys and lines; `tools/pictures.py`
    makes the picture anew.
    """
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "OPERATIONS.md").read_text()
    captured = " ".join(page.partition("### A screen")[2].partition("\n###")[0].split())
    drawn = html.unescape(
        re.sub(r"<[^>]*>", " ", (docs / "pictures/top.svg").read_text().partition("</style>")[2])
    )
    picture = " ".join(drawn.split())
    labels = [
        line.split()[0]
        for line in summary(
            status() | {"cluster": {"live": 1, "nodes": 2, "waiting": [], "missing": []}}, 1.0
        ).splitlines()
    ]
    for shown in (captured, picture):
        for headings in (QUEUE, CHECKPOINTS):
            assert " ".join(headings) in shown
        for word in [*words_of(TopScreen.BINDINGS), *labels[1:-1]]:
            assert word in shown, word


def test_keys_ask_before_they_do() -> None:
    daemon = Daemon()
    app = TopScreen([Mount("/mnt/x", daemon.ask)], 0.2)

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


def test_members_take_the_place_of_the_checkpoints() -> None:
    daemon = Daemon()
    app = TopScreen([Mount("/mnt/x", daemon.ask)], 0.2)

    async def scenario() -> None:
        async with app.run_test(size=(120, 40)) as pilot:
            members, checkpoints = (
                app.query_one(name, DataTable) for name in ("#members", "#checkpoints")
            )

            def shown() -> list[str | None]:
                return [table.id for table in app.query(DataTable) if table.display]

            await until(pilot, lambda: checkpoints.row_count == 1)
            assert shown() == ["queue", "checkpoints"]
            await pilot.press("m")
            await until(pilot, lambda: members.row_count == 2)
            assert shown() == ["queue", "members"]
            assert [str(members.get_row_at(at)[0]) for at in range(2)] == ["this", "n7"]
            await pilot.press("m")
            assert shown() == ["queue", "checkpoints"]

    asyncio.run(scenario())


def test_several_mounts_and_keys_act_on_the_one_that_is_shown() -> None:
    first = Daemon()
    second = Daemon()
    first.broken = "it hangs"
    app = TopScreen([Mount("/mnt/a", first.ask), Mount("/mnt/b", second.ask)], 0.2)

    async def scenario() -> None:
        async with app.run_test(size=(120, 40)) as pilot:
            mounts = app.query_one("#mounts", DataTable)
            await until(
                pilot, lambda: mounts.row_count == 2 and str(mounts.get_row_at(1)[1]) == "serving"
            )
            assert [str(cell) for cell in mounts.get_row_at(0)[:2]] == ["/mnt/a", "no answer"]
            await until(pilot, lambda: "it hangs" in app.told)
            await pilot.press("f", "s", "y")
            assert second.asked == [], "what was asked of one mount is not done to another"
            await until(pilot, lambda: app.query_one("#queue", DataTable).row_count == 2)
            await pilot.press("f", "y")
            await until(pilot, lambda: second.asked == [("flush", {"paths": []})])
            assert first.asked == []

    asyncio.run(scenario())


@pytest.mark.parametrize("columns", [80, 110, 200])
def test_what_decides_fits_the_terminal(columns: int) -> None:
    """But for `why`, the last column of the queue, which may be a sentence."""
    daemon = Daemon()
    daemon.status = status() | {"cluster": {"live": 1, "nodes": 2, "waiting": [], "missing": []}}
    daemon.status["queue"][0]["name"] = "run1/checkpoints/of-today/step-100/model.pt"
    for part in ("dirty_bytes", "clean_bytes", "budget_bytes"):
        daemon.status["ram"][part] = 1023 << 20
    daemon.status["ram"] |= {
        "share_bytes": 1023 << 20,
        "owners": [
            {
                "uid": (1 << 32) - 2 - number,
                "taken_bytes": 1023 << 20,
                "reserved_bytes": 1023 << 20,
                "waiting_writers": 1000,
            }
            for number in range(9)
        ],
    }
    daemon.status["waiting"] = [
        {
            "path": "run1/checkpoints/of-today/step-100/global_step100/mp_rank_00_model_states.pt",
            "pid": 4194304,
            "command": "fifteen-letters",
            "wanted_bytes": 1023 << 20,
            "since": time.time() - 7200,
        }
    ]
    other = Daemon()
    app = TopScreen([Mount("/mnt/x", daemon.ask), Mount("/mnt/y", other.ask)], 0.2)

    async def scenario() -> None:
        async with app.run_test(size=(columns, 40)) as pilot:
            queue = app.query_one("#queue", DataTable)
            await until(pilot, lambda: queue.row_count == 2)
            await until(pilot, lambda: app.query_one("#mounts", DataTable).row_count == 2)
            await pilot.press("m")
            members = app.query_one("#members", DataTable)
            await until(pilot, lambda: members.row_count == 2)
            await pilot.press("m")
            await pilot.pause()
            for name in ("#mounts", "#checkpoints"):
                assert app.query_one(name, DataTable).virtual_size.width <= columns, name
            *before, why = queue.ordered_columns
            assert str(why.label) == "why"
            assert sum(column.get_render_width(queue) for column in before) <= columns - 20
            shown = str(app.query_one("#summary", Static).visual)
            assert max(map(len, shown.splitlines())) <= columns - MARGINS, shown
            assert shown.count("share    user 42949672") == OWNERS_MAX
            keys = [key for key in app.query(FooterKey) if key.display]
            assert max(key.region.right for key in keys) <= columns
            assert len(keys) >= len(words_of(TopScreen.BINDINGS))

    asyncio.run(scenario())


def test_time_lines_share_one_scale() -> None:
    def report(*times: float | None) -> show.Json:
        return CHECKPOINT | dict(zip(("began_at", "closed_at", "persisted_at"), times, strict=True))

    lines = [
        row[-1]
        for row in checkpoint_rows(
            [report(100.0, 106.0, 112.0), report(112.0, 118.0, None), report(None, None, None)],
            124.0,
        )
    ]
    assert lines == ["██████▒▒▒▒▒▒············", "············██████▒▒▒▒▒▒", ""]
    assert (
        checkpoint_rows([report(124.0, 124.0, 124.0), report(0.0, 1.0, 2.0)], 124.0)[0][-1]
        == "·" * 23 + "█"
    ), "it can be seen"


def test_what_is_wrong_comes_first_and_is_not_endless() -> None:
    rows = [
        member("near", "live", 1.0),
        member("far", "live", 60.0),
        member("dead", "missing"),
        member("me", "this"),
    ]
    assert [row["node"] for row in members_worst_first(rows)] == ["me", "dead", "far", "near"]
    found = status() | {
        "parked": 0,
        "cluster": {
            "live": 0,
            "nodes": 40,
            "waiting": [],
            "missing": [f"n{number}" for number in range(40)],
        },
    }
    assert wrong(found) == [*(f"n{number} is missing" for number in range(5)), "and 35 more"]
    assert mount_row("/mnt/a", found)[-1] == "; ".join(wrong(found))


def test_other_commands_do_not_load_it() -> None:
    code = (
        "import sys; import acpfs.cli.ctl, acpfs.cli.verbs.status, acpfs.cli.verbs.top; "
        "sys.exit('textual' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S).returncode
        == 0
    )
