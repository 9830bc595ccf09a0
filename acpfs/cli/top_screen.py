"""The screen of `acpfs-ctl top`, the only module that imports textual: a summary, the queue, checkpoints, and keys that ask before they do.

The daemon is asked in a thread; one that does not answer leaves the screen as it was, and says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.widgets import DataTable, Footer, Static

from acpfs.cli import show
from acpfs.errors import AcpfsError

BAR = 40
QUEUE = ("name", "operation", "size", "state", "age", "tries", "why")
CHECKPOINTS = ("checkpoint", "state", "size", "saved in", "persisted in", "loads from")
SHOWN_MAX = 50
Ask = Callable[[str, dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a key would do, once it is confirmed."""

    text: str
    verb: str
    args: dict[str, Any]


def summary(status: show.Json, rate: float | None) -> str:
    """The upper lines. `rate`: bytes persisted per second since the last look."""
    ram, health, cluster = status["ram"], status["backing_health"], status["cluster"]
    dirty, clean = (round(BAR * ram[key] / max(1, ram["budget_bytes"])) for key in ("dirty_bytes", "clean_bytes"))
    bar = ("█" * dirty + "▒" * clean).ljust(BAR, "·")[:BAR]
    oldest = status["oldest_unpersisted_age_s"]
    safe = f"{status['queue_length']} operations, {show.size(status['queue_bytes'])}; the oldest is {show.duration(oldest)} old"
    lines = [
        f"{show.printable(status['mount'])} over {show.printable(status['backing'])}: {status['state']}, {status['transport']}",
        (
            f"RAM      [{bar}] {show.size(ram['dirty_bytes'])} not persisted █, {show.size(ram['clean_bytes'])} clean ▒ "
            f"of {show.size(ram['budget_bytes'])}"
        ),
        f"drain    {'?' if rate is None else show.size(rate) + '/s'}; storage {health['state']}"
        + (f": {health['last_error']}" if health["last_error"] else ""),
        f"not safe {safe if status['queue_length'] else 'nothing: all is persisted'}",
    ]
    wrong = [f"{status[key]} {text}" for key, text in (("parked", "refused for good"), ("interrupted", "without a writer")) if status[key]]
    if cluster is not None:
        lines.append(f"members  {cluster['live']} of {cluster['nodes']} others live; {len(cluster['waiting'])} pointers wait")
        wrong += [f"{node} is missing" for node in cluster["missing"]]
    if wrong:
        lines.append(f"WRONG    {'; '.join(wrong)}")
    for one in status["waiting"][:3]:
        age = show.duration(max(0.0, time.time() - one["since"]))
        lines.append(
            f"waits    {one['command'] or one['pid'] or '?'} for {show.size(one['wanted_bytes'])} ({show.printable(one['path'])}), {age}"
        )
    return "\n".join(lines)


def queue_row(entry: show.Json) -> tuple[str, ...]:
    """Of the queue's table."""
    why = show.last_error(entry) if entry["last_error"] else entry["why"]
    figures = (show.size(entry["size"]), entry["state"], show.duration(entry["age_s"]), str(entry["tries"]))
    return (show.printable(entry["name"]), entry["operation"], *figures, show.printable(why))


def checkpoint_row(report: show.Json) -> tuple[str, ...]:
    """Of the checkpoints' table."""
    times = ("?" if report[key] is None else show.duration(report[key]) for key in ("save_s", "persist_s"))
    return (show.printable(report["path"]), report["state"], show.size(report["bytes"]), *times, report["loads_from"])


class TopScreen(App[None]):
    """See above."""

    CSS = "#summary {height: auto; padding: 0 1} #told {height: 1; padding: 0 1} DataTable {height: 1fr}"
    BINDINGS = [  # noqa: RUF012 -- textual reads it from the class
        Binding("f", "flush", "flush"),
        Binding("t", "retry", "retry entry"),
        Binding("p", "pin", "pin checkpoint"),
        Binding("r", "release", "release deletions"),
        Binding("y", "confirm", "yes", show=False),
        Binding("n", "dismiss", "no", show=False),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, mountpoint: str, ask: Ask, interval_s: float) -> None:
        """`ask`: asks the daemon one verb; it may block."""
        super().__init__()
        self.title = f"acpfs {mountpoint}"
        self._ask, self._interval_s = ask, interval_s
        self.told = ""
        self._asked: Asked | None = None
        self._persisted: tuple[float, int] | None = None
        self._queue: list[show.Json] = []
        self._checkpoints: list[show.Json] = []

    def compose(self) -> ComposeResult:
        yield Static(id="summary", markup=False)
        yield DataTable(id="queue", cursor_type="row")
        yield DataTable(id="checkpoints", cursor_type="row")
        yield Static(id="told", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        for name, headings in (("#queue", QUEUE), ("#checkpoints", CHECKPOINTS)):
            self._table(name).add_columns(*headings)
        self.look()
        self.set_interval(self._interval_s, self.look)

    def _table(self, name: str) -> DataTable[str]:
        table: DataTable[str] = self.query_one(name, DataTable)
        return table

    @work(thread=True, exclusive=True, group="look")
    def look(self) -> None:
        """Ask the daemon, in a thread, and draw what it says."""
        try:
            status, checkpoints = self._ask("status", {}), self._ask("checkpoints", {"paths": []})["items"]
        except (AcpfsError, OSError) as error:
            self.call_from_thread(self.tell, f"no answer: {error}")
            return
        self.call_from_thread(self._draw, status, checkpoints)

    def _draw(self, status: show.Json, checkpoints: list[show.Json]) -> None:
        now, persisted = time.monotonic(), status["counters"].get("persisted_bytes", 0)
        rate = None
        if self._persisted is not None and now > self._persisted[0]:
            rate = max(0.0, (persisted - self._persisted[1]) / (now - self._persisted[0]))
        self._persisted = (now, persisted)
        self.query_one("#summary", Static).update(summary(status, rate))
        self._queue, self._checkpoints = status["queue"][:SHOWN_MAX], checkpoints[::-1][:SHOWN_MAX]
        self._fill("#queue", [queue_row(entry) for entry in self._queue])
        self._fill("#checkpoints", [checkpoint_row(report) for report in self._checkpoints])

    def _fill(self, name: str, rows: list[tuple[str, ...]]) -> None:
        from rich.text import Text

        table = self._table(name)
        at = table.cursor_row
        table.clear()
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))  # type: ignore[arg-type]  # a cell is what rich can draw
        if rows:
            table.move_cursor(row=min(at, len(rows) - 1))

    # -- keys

    def tell(self, text: str) -> None:
        """One line below the tables."""
        self.told = show.printable(text)
        self.query_one("#told", Static).update(self.told)

    def action_flush(self) -> None:
        self._propose(Asked("wait until all is persisted", "flush", {"paths": []}))

    def action_retry(self) -> None:
        entry = self._chosen("#queue", self._queue)
        if entry is not None:
            self._propose(Asked(f"try {entry['name']} again now", "retry", {"paths": [entry["name"]]}))

    def action_pin(self) -> None:
        report = self._chosen("#checkpoints", self._checkpoints)
        if report is not None:
            self._propose(Asked(f"keep {report['path']} in RAM", "pin", {"paths": [report["path"]]}))

    def action_release(self) -> None:
        self._propose(Asked("carry out all deletions that are held back", "release", {"paths": []}))

    def _chosen(self, name: str, entries: list[show.Json]) -> show.Json | None:
        at = self._table(name).cursor_row
        return entries[at] if 0 <= at < len(entries) else None

    def _propose(self, asked: Asked) -> None:
        self._asked = asked
        self.tell(f"{asked.text}? y / n")

    def action_dismiss(self) -> None:
        self._asked = None
        self.tell("")

    def action_confirm(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            self.tell(f"{asked.text} …")
            self.carry_out(asked)

    @work(thread=True, group="act")
    def carry_out(self, asked: Asked) -> None:
        """In a thread: a flush may take long."""
        try:
            self._ask(asked.verb, asked.args)
        except (AcpfsError, OSError) as error:
            self.call_from_thread(self.tell, f"{asked.text}: {error}")
        else:
            self.call_from_thread(self.tell, f"{asked.text}: done")
