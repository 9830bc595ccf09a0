"""The screen of `acpfs-ctl top`, the only module that imports textual: a summary, the queue,
checkpoints, members, and keys that ask.

With several mounts a table of them stands above, and the rest is of the one that its cursor is on.
Daemons are asked in threads; one that does not answer leaves its picture as it was, and says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.widgets import DataTable, Footer, Static

from acpfs.cli import show
from acpfs.cli.verbs import nodes
from acpfs.cli.verbs.status import copies_facts
from acpfs.errors import AcpfsError

BAR = 40
BAR_NARROW = 10
TIME_LINE = 24
WIDE = 110
"""Columns of a terminal from which on all is shown; in one of 80 there is room for what decides."""
MOUNTS = ("mount", "state", "not safe", "oldest", "RAM", "dirty", "storage", "wrong")
QUEUE = ("name", "operation", "size", "state", "age", "tries", "why")
CHECKPOINTS = (
    "checkpoint",
    "state",
    "size",
    "saved in",
    "persisted in",
    "loads from",
    "time line: █ saved ▒ persisted",
)
NOT_IN_NARROW = frozenset(
    {"oldest", "RAM", "operation", "tries", "loads from", CHECKPOINTS[-1]}
    | {"host", "heard", "clock ahead", "bound"}
)
NAME_NARROW = 22
"""Characters of the first column there."""
MARGINS = 2
"""Columns beside the upper lines."""
SHOWN_MAX = 50
MISSING_MAX = 5
HELD_MAX = 3
"""Nodes of which something is held here, the largest first."""
OWNERS_MAX = 3
"""Members that are named; of a rack that is down nobody reads them all."""
MEMBERS_EVERY = 5
"""Looks: a daemon reads a record for each member, and there may be a thousand."""
HEADINGS: dict[str, Sequence[str]] = {
    "#mounts": MOUNTS,
    "#queue": QUEUE,
    "#checkpoints": CHECKPOINTS,
    "#members": nodes.HEADINGS,
}
"""Table → its columns, in a terminal that has room for them."""
SILENT_S = 3.0
"""So long an answer may take before it is said that there is none."""
Ask = Callable[[str, dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Mount:
    """One daemon: `ask` asks it one verb, and may block."""

    mountpoint: str
    ask: Ask


@dataclass(frozen=True, slots=True)
class Asked:
    """What a key would do, once it is confirmed."""

    text: str
    verb: str
    args: dict[str, Any]


def summary(status: show.Json, rate: float | None, columns: int = WIDE) -> str:
    """The upper lines. `rate`: bytes that reached the storage per second since the last look;
    `columns`: of the terminal.
    """
    bar_width = BAR if columns >= WIDE else BAR_NARROW
    ram = status["ram"]
    health = status["backing_health"]
    cluster = status["cluster"]
    dirty, clean = (
        round(bar_width * ram[key] / max(1, ram["budget_bytes"]))
        for key in ("dirty_bytes", "clean_bytes")
    )
    bar = ("█" * dirty + "▒" * clean).ljust(bar_width, "·")[:bar_width]
    oldest = status["oldest_unpersisted_age_s"]
    safe = (
        f"{show.counted(status['queue_length'], 'operation')}, "
        f"{show.size(status['queue_bytes'])}; the oldest is {show.duration(oldest)} old"
    )
    lines = [
        (
            f"{show.printable(status['mount'])} over {show.printable(status['backing'])}: "
            f"{status['state']}, {status['transport']}"
        ),
        (
            f"RAM      [{bar}] {show.size(ram['dirty_bytes'])} not persisted █, "
            f"{show.size(ram['clean_bytes'])} clean ▒ "
            f"of {show.size(ram['budget_bytes'])}"
        ),
        f"drain    {'?' if rate is None else show.size(rate) + '/s'}; storage {health['state']}"
        + (f": {show.printable(health['why'])}" if health["why"] else ""),
        f"not safe {safe if status['queue_length'] else 'nothing: all is persisted'}",
    ]
    if cluster is not None:
        lines.append(
            f"members  {cluster['live']} of {cluster['nodes']} others live; "
            f"{len(cluster['waiting'])} pointers wait"
        )
    lines += [f"{name:<8} {told}" for name, told in copies_facts(status)[: 1 + HELD_MAX]]
    over = [one for one in ram.get("owners") or () if one["waiting_writers"]]
    lines += [f"share    {show.owner_share(ram, one)}" for one in over[:OWNERS_MAX]]
    if found := wrong(status):
        lines.append(f"WRONG    {'; '.join(found)}")
    for one in status["waiting"][:3]:
        age = show.duration(max(0.0, time.time() - one["since"]))
        who = f"waits    {one['command'] or one['pid'] or '?'} for "
        before = f"{who}{show.size(one['wanted_bytes'])} ("
        behind = f"), {age}"
        room = columns - MARGINS - len(before) - len(behind)
        path = end_of(show.printable(one["path"]), max(NAME_NARROW, room))
        lines.append(f"{before}{path}{behind}")
    return "\n".join(lines)


def end_of(name: str, length: int) -> str:
    """Of a path the end says more than the beginning; at most so many characters."""
    return name if len(name) <= length else "…" + name[1 - length :]


def drained_bytes(status: show.Json) -> int:
    """What has reached the storage so far, also of files that are still on their way there.

    A large file is persisted in one moment, after minutes in which all its bytes went there.
    """
    persisted: int = status["counters"].get("persisted_bytes", 0)
    on_their_way: int = sum(entry["streamed_bytes"] for entry in status["queue"])
    return persisted + on_their_way


def wrong(status: show.Json) -> list[str]:
    """What needs a person."""
    found = [
        f"{status[key]} {text}"
        for key, text in (("parked", "refused for good"), ("interrupted", "without a writer"))
        if status[key]
    ]
    missing = status["cluster"]["missing"] if status["cluster"] is not None else []
    found += [f"{node} is missing" for node in missing[:MISSING_MAX]]
    return found + (
        [f"and {len(missing) - MISSING_MAX} more"] if len(missing) > MISSING_MAX else []
    )


def mount_row(mountpoint: str, status: show.Json | None) -> tuple[str, ...]:
    """Of the table of mounts; None: it has not answered."""
    if status is None:
        return (show.printable(mountpoint), "no answer", *("?" for _ in MOUNTS[2:]))
    ram = status["ram"]
    many = status["queue_length"]
    return (
        show.printable(mountpoint),
        status["state"],
        f"{show.counted(many, 'operation')}, {show.size(status['queue_bytes'])}"
        if many
        else "nothing",
        show.duration(status["oldest_unpersisted_age_s"]) if many else "",
        f"{show.size(ram['used_bytes'])} of {show.size(ram['budget_bytes'])}",
        show.size(ram["dirty_bytes"]),
        status["backing_health"]["state"],
        "; ".join(wrong(status)),
    )


def queue_row(entry: show.Json) -> tuple[str, ...]:
    """Of the queue's table."""
    why = show.last_error(entry) if entry["last_error"] else entry["why"]
    figures = (
        show.size(entry["size"]),
        show.state(entry),
        show.duration(entry["age_s"]),
        str(entry["tries"]),
    )
    return (show.printable(entry["name"]), entry["operation"], *figures, show.printable(why))


def time_line(report: show.Json, since: float, now: float) -> str:
    """When it was saved (█) and then persisted (▒) between two times.

    What was not written through this mount has none.
    """
    began = report["began_at"]
    if began is None or now <= since:
        return ""
    closed = now if report["closed_at"] is None else report["closed_at"]
    persisted = now if report["persisted_at"] is None else report["persisted_at"]
    first, between, last = (
        min(TIME_LINE, max(0, int(TIME_LINE * (at - since) / (now - since))))
        for at in (began, closed, persisted)
    )
    first = min(first, TIME_LINE - 1)
    saving = "█" * max(1, between - first)  # also the shortest save can be seen
    return (("·" * first + saving).ljust(last, "▒")).ljust(TIME_LINE, "·")[:TIME_LINE]


def checkpoint_rows(reports: Sequence[show.Json], now: float) -> list[tuple[str, ...]]:
    """Of the checkpoints' table, whose time lines go from the first of them until now."""
    began = [report["began_at"] for report in reports if report["began_at"] is not None]
    since = min(began, default=now)
    rows = []
    for report in reports:
        times = (
            "?" if report[key] is None else show.duration(report[key])
            for key in ("save_s", "persist_s")
        )
        state = show.checkpoint_state(report)
        figures = (state, show.size(report["bytes"]), *times, report["loads_from"])
        rows.append((show.printable(report["path"]), *figures, time_line(report, since, now)))
    return rows


def narrowed(headings: Sequence[str], row: Sequence[str]) -> tuple[str, ...]:
    """A row without what a narrow terminal has no room for, its first cell shortened."""
    first, *others = (
        cell for heading, cell in zip(headings, row, strict=True) if heading not in NOT_IN_NARROW
    )
    return (end_of(first, NAME_NARROW), *others)


def members_worst_first(rows: Sequence[show.Json]) -> list[show.Json]:
    """This one, what is missing or lost, then who is furthest behind."""
    calm = ("live", "left", "forgotten")
    return sorted(
        rows,
        key=lambda row: (
            row["state"] != "this",
            row["state"] in calm,
            -(row["lag_s"] or 0.0),
            row["node"],
        ),
    )


class TopScreen(App[None]):
    """See above."""

    CSS = (
        "#summary {height: auto; padding: 0 1} #told {height: 1; padding: 0 1} DataTable "
        "{height: 1fr} "
        "#mounts {height: auto; max-height: 8} .hidden {display: none}"
    )
    BINDINGS = [  # noqa: RUF012 -- textual reads it from the class
        Binding("f", "flush", "flush"),
        Binding("t", "retry", "retry"),
        Binding("p", "pin", "pin"),
        Binding("r", "release", "release"),
        Binding("m", "members", "members"),
        Binding("s", "next", "next mount"),
        Binding("y", "confirm", "yes", show=False),
        Binding("n", "dismiss", "no", show=False),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, mounts: Sequence[Mount], interval_s: float) -> None:
        """At least one mount."""
        super().__init__()
        self._mounts = mounts
        self._interval_s = interval_s
        self._shown = mounts[0]
        self.told = ""
        self._asked: Asked | None = None
        self._statuses: dict[str, show.Json] = {}
        self._drained: dict[str, tuple[float, int]] = {}
        self._looks = 0
        self._out: dict[str, float] = {}
        """Mounts that are being asked, and since when (monotonic, seconds)."""
        self._queue: list[show.Json] = []
        self._checkpoints: list[show.Json] = []

    def compose(self) -> ComposeResult:
        yield DataTable(
            id="mounts", cursor_type="row", classes="" if len(self._mounts) > 1 else "hidden"
        )
        yield Static(id="summary", markup=False)
        yield DataTable(id="queue", cursor_type="row")
        yield DataTable(id="checkpoints", cursor_type="row")
        yield DataTable(id="members", cursor_type="row", classes="hidden")
        yield Static(id="told", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        for name in HEADINGS:
            self._fill(name, [])
        self._show(self._shown)
        self.set_interval(self._interval_s, self._look_at_all)

    def _table(self, name: str) -> DataTable[str]:
        table: DataTable[str] = self.query_one(name, DataTable)
        return table

    def _show(self, mount: Mount) -> None:
        """Draw this one from now on. What was asked about another one is not carried out."""
        self._shown = mount
        self._asked = None
        self._looks = 0
        self.title = f"acpfs {mount.mountpoint}"
        self.tell("")
        self._look_at_all()

    def _look_at_all(self) -> None:
        """One thread for each daemon: one that hangs holds up no other, and is not asked again
        meanwhile.
        """
        if self._is_closing():
            return
        for mount in self._mounts:
            shown = mount is self._shown
            since = self._out.get(mount.mountpoint)
            if since is not None:
                if shown and (silent_s := time.monotonic() - since) > SILENT_S:
                    self.tell(f"no answer for {show.duration(silent_s)}")
                continue
            members = shown and self._table("#members").display and self._looks % MEMBERS_EVERY == 0
            self._looks += shown
            self._out[mount.mountpoint] = time.monotonic()
            self.run_worker(
                partial(self._look, mount, shown=shown, members=members), thread=True, group="look"
            )

    def _look(self, mount: Mount, *, shown: bool, members: bool) -> None:
        """In a thread."""
        try:
            status = mount.ask("status", {})
            checkpoints = mount.ask("checkpoints", {"paths": []})["items"] if shown else []
            rows = mount.ask("nodes", {})["nodes"] if members else None
        except (AcpfsError, OSError) as error:
            self.call_from_thread(self._no_answer, mount, error)
        else:
            self.call_from_thread(self._draw, mount, status, checkpoints if shown else None, rows)
        finally:
            self._out.pop(mount.mountpoint, None)

    def _is_closing(self) -> bool:
        """An answer, or the next look, may come when the screen is being taken down, and has
        nowhere to go.
        """
        return not self.query("#told")

    def _no_answer(self, mount: Mount, error: Exception) -> None:
        if self._is_closing():
            return
        self._statuses.pop(mount.mountpoint, None)
        self._fill_mounts()
        if mount is self._shown:
            self.tell(f"no answer: {error}")

    def _draw(
        self,
        mount: Mount,
        status: show.Json,
        checkpoints: list[show.Json] | None,
        members: list[show.Json] | None,
    ) -> None:
        if self._is_closing():
            return
        self._statuses[mount.mountpoint] = status
        self._fill_mounts()
        if mount is not self._shown or checkpoints is None:
            return  # asked for the line in the table only
        self.query_one("#summary", Static).update(
            summary(status, self._rate(mount, status), self.size.width)
        )
        self._queue = status["queue"][:SHOWN_MAX]
        self._checkpoints = checkpoints[::-1][:SHOWN_MAX]
        self._fill("#queue", [queue_row(entry) for entry in self._queue])
        self._fill("#checkpoints", checkpoint_rows(self._checkpoints, time.time()))
        if members is not None:
            self._fill(
                "#members",
                [nodes.member_row(row) for row in members_worst_first(members)[:SHOWN_MAX]],
            )

    def _rate(self, mount: Mount, status: show.Json) -> float | None:
        """Bytes that reached the storage per second since the last look at it."""
        now = time.monotonic()
        reached = drained_bytes(status)
        before = self._drained.get(mount.mountpoint)
        self._drained[mount.mountpoint] = (now, reached)
        if before is None or now <= before[0]:
            return None
        return max(0.0, (reached - before[1]) / (now - before[0]))

    def _fill_mounts(self) -> None:
        if len(self._mounts) > 1:
            names = [mount.mountpoint for mount in self._mounts]
            self._fill("#mounts", [mount_row(name, self._statuses.get(name)) for name in names])
            self._table("#mounts").move_cursor(row=names.index(self._shown.mountpoint))

    def _is_narrow(self) -> bool:
        return self.size.width < WIDE

    def _fill(self, name: str, rows: list[tuple[str, ...]]) -> None:
        from rich.text import Text

        table = self._table(name)
        at = table.cursor_row
        headings = tuple(HEADINGS[name])
        if self._is_narrow():
            rows = [narrowed(headings, row) for row in rows]
            headings = tuple(one for one in headings if one not in NOT_IN_NARROW)
        if tuple(str(column.label) for column in table.ordered_columns) == headings:
            table.clear()
        else:  # at the start, and when the terminal was made wider or narrower
            table.clear(columns=True)
            table.add_columns(*headings)
        for row in rows:
            # a cell is what rich can draw
            table.add_row(*(Text(cell) for cell in row))  # type: ignore[arg-type]
        if rows:
            table.move_cursor(row=min(at, len(rows) - 1))

    # -- keys

    def tell(self, text: str) -> None:
        """One line below the tables."""
        self.told = show.printable(text)
        self.query_one("#told", Static).update(self.told)

    def action_next(self) -> None:
        self._show(self._mounts[(self._mounts.index(self._shown) + 1) % len(self._mounts)])

    def action_members(self) -> None:
        """All mounts of the backing directory, in the place of the checkpoints; and back."""
        members = self._table("#members")
        members.toggle_class("hidden")
        self._table("#checkpoints").set_class(members.display, "hidden")
        self._looks = 0
        self._look_at_all()

    def action_flush(self) -> None:
        self._propose(Asked("wait until all is persisted", "flush", {"paths": []}))

    def action_retry(self) -> None:
        entry = self._chosen("#queue", self._queue)
        if entry is not None:
            self._propose(
                Asked(f"try {entry['name']} again now", "retry", {"paths": [entry["name"]]})
            )

    def action_pin(self) -> None:
        report = self._chosen("#checkpoints", self._checkpoints)
        if report is not None:
            self._propose(
                Asked(f"keep {report['path']} in RAM", "pin", {"paths": [report["path"]]})
            )

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
        asked = self._asked
        self._asked = None
        if asked is not None:
            self.tell(f"{asked.text} …")
            self.carry_out(self._shown, asked)

    @work(thread=True, group="act")
    def carry_out(self, mount: Mount, asked: Asked) -> None:
        """In a thread: a flush may take long."""
        try:
            mount.ask(asked.verb, asked.args)
        except (AcpfsError, OSError) as error:
            self.call_from_thread(self.tell, f"{asked.text}: {error}")
        else:
            self.call_from_thread(self.tell, f"{asked.text}: done")
