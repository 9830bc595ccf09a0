"""`acpfs-ctl status`: says first what is not yet safe and why, then the rest."""

from __future__ import annotations

import time

import click

from acpfs.cli import show
from acpfs.cli.target import Target, ask
from acpfs.cli.verbs.flush import JSON_OPTION
from acpfs.control.socket_messages import error_message
from acpfs.errors import AcpfsError, NotMountedError

WATCH_INTERVAL_S = 1.0
QUEUE_ROWS_MAX = 15
WAITING_LINES_MAX = 10
OWNERS_MAX = 5
LONG_WRITTEN_S = 60.0
PASSTHROUGH = "passthrough"
"""The lane in which the kernel serves files itself; each mount has one other."""
"""What is written for less is a save under way."""
WITHHELD_TEXT = {
    "lost": "LOST what it may point at",
    "unknown": "is UNKNOWN here",
    "missing": "is MISSING",
    "withheld": "WITHHOLDS one that was closed before",
    "named": "WITHHOLDS the change of a pointer that still names it",
}
WAY_TEXT = {"sealed": "sealed", "tls": "in TLS", "plain": "not encrypted"}
HEALTH_TEXT = {
    "ok": "answers",
    "slow": "is slow",
    "refusing": "refuses calls",
    "stuck": "does not answer",
}


@click.command("status")
@JSON_OPTION
@click.option("--watch", is_flag=True, help="Repeat every second until interrupted.")
@click.pass_obj
def command(target: Target, as_json: bool, watch: bool) -> None:
    """What is not yet safe, and why; RAM tier, queue, health of the backing directory."""
    while True:
        try:
            record = target.record()
            if not record.alive and _tell_held(record.mountpoint, as_json=as_json):
                return  # its control socket is held as well, and would wait with the rest
            status = ask(record, "status")
        except AcpfsError as error:
            tell_bypassed(target, error, as_json=as_json)
            return
        if watch and not as_json:
            click.clear()
        if as_json:
            show.print_json(status)
        else:
            tell(status)
        if not watch:
            return
        time.sleep(WATCH_INTERVAL_S)


def tell_bypassed(target: Target, error: AcpfsError, *, as_json: bool) -> None:
    """No daemon answers: is it because the mount fell through?

    Raises:
        AcpfsError: it is not that.
    """
    from acpfs.control import registry
    from acpfs.supervisor import fallthrough

    wanted = None if target.mountpoint is None else registry.normalised(target.mountpoint)
    found = [
        beneath
        for _runtime, beneath in fallthrough.bypassed()
        if wanted in (None, beneath.mountpoint)
    ]
    if not isinstance(error, NotMountedError) or len(found) != 1:
        if as_json:
            show.print_json(error_message(error))
        raise error
    beneath = found[0]
    if as_json:
        show.print_json(
            {
                "state": "bypassed",
                "mount": beneath.mountpoint,
                "backing": beneath.backing,
                "bypassed_since": beneath.since,
                "bypass_reason": beneath.reason,
                "kept_operations": beneath.kept_operations,
                "kept_bytes": beneath.kept_bytes,
            }
        )
        return
    age = show.duration(time.time() - beneath.since)
    line = (
        f"BYPASSED for {age} ({show.printable(beneath.reason)}), without a daemon: "
        f"{show.printable(beneath.mountpoint)} is native"
    )
    show.console().print(line, style="bold red", markup=False)
    show.console().print(
        _kept(beneath.kept_operations, beneath.kept_bytes), style="bold yellow", markup=False
    )


def _tell_held(mountpoint: str, *, as_json: bool) -> bool:
    """Whether a keeper holds the mount for the next daemon, or for one that starts just now; then
    that is what is said.
    """
    from acpfs.control import runtime
    from acpfs.supervisor import keeper_client

    all_held = [
        one
        for place in runtime.places_to_look()
        for one in keeper_client.held(place / keeper_client.SOCKET) or ()
    ]
    found = [one for one in all_held if one["mount"] == mountpoint and one["phase"] != "served"]
    if not found:
        return False
    if as_json:
        show.print_json({"state": "held", **found[0]})
        return True
    one = found[0]
    until = "" if one["left_s"] is None else f"; for another {show.duration(one['left_s'])}"
    line = (
        f"HELD by a keeper for {show.duration(one['alone_s'])}, without a daemon: calls in "
        f"{show.printable(one['mount'])} wait{until}"
    )
    show.console().print(line, style="bold red", markup=False)
    return True


def _kept(operations: int | None, size: int | None) -> str:
    if operations is None or size is None:
        return (
            "the state of the RAM tier cannot be read: it may hold files that the backing "
            "directory "
            "has not got; `acpfs mount` looks again"
        )
    return (
        f"{operations} operations ({show.size(size)}) were in the RAM tier then; `acpfs mount` "
        "drains what is left of them"
    )


def tell(status: show.Json) -> None:
    """For people."""
    for line in unsafe_lines(status):
        show.console().print(
            line, style="bold green" if line.startswith("safe") else "bold yellow", markup=False
        )
    out = show.console()
    for heading, text in _facts(status):
        out.print(f"{heading:<8} {text}", markup=False)
    for held in status.get("guarded", ()):
        out.print(f"guarded  {_guarded(held)}", markup=False)
    for warning in status["warnings"]:
        out.print(f"note     {show.printable(warning)}", markup=False)
    if status["queue"]:
        print_queue(status)


def _facts(status: show.Json) -> list[tuple[str, str]]:
    ram = status["ram"]
    health = status["backing_health"]
    worker = status["worker"]
    up = show.duration(time.time() - worker["started_at"])
    oldest = show.duration(health["oldest_call_s"])
    used = show.size(ram["used_bytes"])
    budget = show.size(ram["budget_bytes"])
    ready = (
        f"; {show.size(ram['prefaulted_bytes'])} more made ready ({ram['prefault']})"
        if ram["prefaulted_bytes"]
        else ""
    )
    parts = ", ".join(
        f"{show.size(ram[f'{kind}_bytes'])} {kind}" for kind in ("dirty", "clean", "reserved")
    )
    parts += (
        f", {show.size(ram['urgent_bytes'])} kept for urgent files"
        if ram.get("urgent_bytes")
        else ""
    )
    parts += "".join(
        f", {show.size(ram[f'{kind}_bytes'])} {kind}"
        for kind in ("retained", "pinned")
        if ram[f"{kind}_bytes"]
    )
    where = f"{show.printable(status['mount'])} over {show.printable(status['backing'])}"
    return [
        ("mount", f"{where}, node {status['node']}, fsync {status['fsync']}"),
        (
            "daemon",
            f"process {worker['pid']}, acpfs {worker['version']}, {status['transport']}, up "
            f"{up}, {show.counted(status['open_files'], 'open file')}"
            + (", held by a keeper" if worker.get("keeper") else "")
            + _predecessor(worker),
        ),
        ("log", show.printable(worker.get("log_file") or "standard error (the journal)")),
        ("lanes", lanes_line(status)),
        ("RAM", f"{used} of {budget} used: {parts}; huge pages {ram['huge_pages']}{ready}"),
        *_share_fact(ram),
        *_urgent_facts(status),
        *_spill_fact(status),
        *copies_facts(status),
        *_cluster_fact(status),
        *_exchange_fact(status),
        ("backing", f"{health['state']}: {health['calls_out']} calls out, the oldest for {oldest}"),
        (
            "events",
            ", ".join(f"{name} {count}" for name, count in status["counters"].items() if count)
            or "none",
        ),
    ]


def _predecessor(worker: show.Json) -> str:
    """Why there was another one: what it died of is nobody's memory but the log's."""
    if not worker.get("last_end"):
        return ""
    return (
        f"; worker {worker['number']}, since the one before it ended: "
        f"{show.printable(worker['last_end'])}"
    )


def _share_fact(ram: show.Json) -> list[tuple[str, str]]:
    """Who has how much of RAM, where that is limited."""
    owners = ram.get("owners") or ()
    if not ram.get("share_bytes"):
        return []
    named = "; ".join(show.owner_share(ram, one) for one in owners[:OWNERS_MAX])
    more = f"; {len(owners) - OWNERS_MAX} more" if len(owners) > OWNERS_MAX else ""
    return [("shares", (named or f"{show.size(ram['share_bytes'])} each, nothing taken") + more)]


def _urgent_facts(status: show.Json) -> list[tuple[str, str]]:
    return [
        (
            "urgent",
            (
                f"{show.printable(one['path'] or 'the mount')}, for another "
                f"{show.duration(one['left_s'])}"
            ),
        )
        for one in status.get("urgent", ())
    ]


def _spill_fact(status: show.Json) -> list[tuple[str, str]]:
    spill = status.get("spill")
    if spill is None:
        return []
    used = show.size(spill["used_bytes"])
    budget = show.size(spill["budget_bytes"])
    copying = (
        f", {show.size(spill['copying_bytes'])} on their way" if spill["copying_files"] else ""
    )
    error = f"; {show.printable(spill['last_error'])}" if spill["last_error"] else ""
    where = f"{show.printable(spill['directory'])} ({spill['mode']})"
    mirror = spill["mirror"]
    if mirror is not None:
        behind = (
            f", {show.counted(mirror['behind_files'], 'file')} "
            f"({show.size(mirror['behind_bytes'])}) behind"
            if mirror["behind_files"]
            else ""
        )
        why = f" ({show.printable(mirror['why'])})" if mirror["why"] else ""
        where += f"; mirror {mirror['state']}{why}{behind}"
    return [
        (
            "spill",
            (
                f"{spill['state']}: {used} of {budget} in "
                f"{show.counted(spill['files'], 'file')}{copying}; {where}{error}"
            ),
        )
    ]


def copies_facts(status: show.Json) -> list[tuple[str, str]]:
    """Where the copy is, what would be lost if this node died now; what is held of others."""
    facts = []
    copies = status.get("copies")
    if copies is not None:
        where = f"1 of 1 at {copies['holder']}" if copies["holder"] else "0 of 1"
        if copies["state"] == "away":
            where += ", which is out of reach"
        why = f" ({show.printable(copies['why'])})" if copies["why"] else ""
        facts.append(
            ("copies", f"{show.printable(where)}, {copies['state']}{why}; {_at_stake(copies)}")
        )
    for one in status.get("held", ()):
        claimed = ", claimed" if one["claimed"] else ""
        if one.get("adoption"):
            claimed += f"; {show.printable(one['adoption'])}"
        facts.append(
            (
                "held",
                (
                    f"{show.size(one['bytes'])} of {show.printable(one['node'])}, heard of "
                    f"{show.duration(one['silent_s'])} ago{claimed}"
                ),
            )
        )
    return facts


def _at_stake(copies: show.Json) -> str:
    """What the loss of this node would take."""
    if copies["taken_over_by"]:
        by = show.printable(copies["taken_over_by"])
        return (
            f"this node was silent, and {by} has adopted what is copied: nothing is committed from "
            f"here any more, and what was closed after operation {copies['until']} is here only"
        )
    if copies["state"] == "away" or (copies["state"] != "on" and copies["holder"]):
        return (
            f"what it has can be adopted; {copies['behind_files']} files "
            f"({show.size(copies['behind_bytes'])}) that were closed since would be lost with this "
            "node"
        )
    if copies["state"] != "on":
        return "all that is not persisted would be lost with this node"
    if copies["behind_files"] or copies["pending"]:
        return (
            f"{show.counted(copies['behind_files'], 'file')} "
            f"({show.size(copies['behind_bytes'])}) behind: they, and what came after the first of "
            "them, would be lost with this node"
        )
    return "nothing would be lost with this node"


def _cluster_fact(status: show.Json) -> list[tuple[str, str]]:
    cluster = status.get("cluster")
    if cluster is None or not cluster["nodes"]:
        return []
    bound = show.duration(cluster["clock_bound_s"])
    drift = (
        f"; the wall clock was set, {cluster['drift_s']:+.1f} s are being worked off"
        if cluster["drift_s"]
        else ""
    )
    return [
        (
            "nodes",
            (
                f"{cluster['nodes']} others, {cluster['live']} live; order: {cluster['order']}, "
                f"clock bound {bound}{drift}"
            ),
        )
    ]


def _exchange_fact(status: show.Json) -> list[tuple[str, str]]:
    exchange = status.get("exchange")
    if exchange is None:
        return []
    failures = f", {exchange['failures']} times in vain" if exchange["failures"] else ""
    protected = _protection(exchange)
    ended = "" if exchange["process"] else "; its process is being started again"
    return [
        (
            "members",
            (
                f"{show.size(exchange['got_bytes'])} read from them{failures}, "
                f"{show.size(exchange['given_bytes'])} given; at "
                f"{show.printable(', '.join(exchange['listens']))}{protected}{ended}"
            ),
        ),
        *(
            ("", f"{show.printable(node)}: {show.printable(why)}")
            for node, why in exchange.get("strange", {}).items()
        ),
    ]


def _protection(exchange: show.Json) -> str:
    """How what goes between nodes is protected, as far as any of them is connected."""
    ways = list(exchange.get("ways", {}).values())
    if not ways:
        return "" if exchange["encrypted"] else f", {WAY_TEXT['plain']}"
    return "".join(
        f", {text}" if count == len(ways) else f", {text} with {count}"
        for way, text in WAY_TEXT.items()
        if (count := ways.count(way))
    )


def _withheld(cluster: show.Json) -> list[str]:
    """What waits for other nodes, the worst first."""
    lines: list[str] = []
    for one in (one for one in cluster["waiting"] if one["withheld"]):
        lines += [
            (
                f"{show.printable(one['path'])} is WITHHELD, since {why_withheld(one)}: see "
                "`acpfs-ctl nodes`, `nodes forget`"
            )
        ]
    waiting = [one for one in cluster["waiting"] if not one["withheld"]]
    if waiting:
        names = show.printable(", ".join(list(waiting[0]["waits_for"])[:WAITING_LINES_MAX]))
        lines.append(
            f"{show.printable(waiting[0]['path'])} waits for other nodes to persist what they "
            f"had closed before: {names}"
        )
    if cluster.get("awaited"):
        lines.append(
            f"{show.printable(cluster['awaited'][0])} is looked up, and waits for the node that "
            "has it to persist it"
        )
    if cluster.get("clock_problem"):
        lines.append(show.printable(cluster["clock_problem"]))
    return lines


def why_withheld(one: show.Json) -> str:
    """The worst of the reasons, and whom the pointer needs where its writer said so."""
    worst, what = next(
        (found for found in WITHHELD_TEXT.items() if found[0] in one["waits_for"].values()),
        ("", "is MISSING"),
    )
    who = [node for node, why in one["waits_for"].items() if worst in (why, "")]
    needs = f" (it needs only {', '.join(one['needs'])})" if one.get("needs") else ""
    return show.printable(f"node {', '.join(who)} {what}{needs}")


def lanes_line(status: show.Json) -> str:
    """How many files are open in each lane, and how many opens went which way and why, the most
    frequent reason first.
    """
    now = ", ".join(f"{lane} {count}" for lane, count in status["lanes"].items())
    choices = sorted(status["lane_choices"].items(), key=lambda choice: -choice[1])
    refused = [(reason, count) for reason, count in choices if reason != PASSTHROUGH and count > 0]
    others = [lane for lane in status["lanes"] if lane != PASSTHROUGH]
    parts = []
    if status["lane_choices"].get(PASSTHROUGH):
        parts.append(f"{PASSTHROUGH} {status['lane_choices'][PASSTHROUGH]}")
    if refused:
        why = "; ".join(f"{count}: {reason}" for reason, count in refused)
        parts.append(f"{', '.join(others)} {sum(count for _reason, count in refused)} ({why})")
    return f"{now} open now" + (f"; opens so far: {', '.join(parts)}" if parts else "")


def unsafe_lines(status: show.Json) -> list[str]:
    """What is not yet safe, most urgent first, and what ails the backing directory; a last line
    that says `safe` where all is.
    """
    health = status["backing_health"]
    lines = []
    if status.get("bypassed_since") is not None:
        age = show.duration(time.time() - status["bypassed_since"])
        lines.append(
            f"BYPASSED for {age} ({show.printable(status['bypass_reason'])}): new opens are "
            "native; `acpfs mount` ends that"
        )
    lines += _who_waits(status)
    if status.get("conflicts_total"):
        first = status["conflicts"][-1]
        beside = (
            f"kept beside as {show.printable(first['kept_as'])}"
            if first["kept_as"]
            else f"{first['operation']} not carried out"
        )
        where = f"the last: {show.printable(first['path'])}, {beside}"
        lines.append(
            f"{status['conflicts_total']} CONFLICTS with native changes, nothing was "
            f"overwritten; {where}"
        )
    if status["parked"]:
        parked = [entry for entry in status["queue"] if entry["state"] == "parked"][:1]
        first = "".join(
            f"; the first: {show.printable(entry['name'])} ({show.last_error(entry)})"
            for entry in parked
        )
        kept = "kept in RAM until `acpfs-ctl retry PATH` (or `--all`) or `discard PATH`"
        lines.append(
            f"{show.counted(status['parked'], 'operation')} REFUSED by the backing directory: "
            f"{kept}{first}"
        )
    if status.get("cluster"):
        lines += _withheld(status["cluster"])
    if status["interrupted"]:
        lines.append(
            f"{show.are(status['interrupted'], 'file')} not whole (the writer was lost, or a write "
            "failed): `acpfs-ctl retry PATH` stores what is there, `discard PATH` drops it"
        )
    lines += _long_written(status)
    if status["state"] == "draining":
        lines.append(
            "the daemon was told to end: it drains, and keeps in the RAM tier what is not done "
            "at its deadline"
        )
    if status["queue_length"]:
        age = show.duration(status["oldest_unpersisted_age_s"])
        why = "".join(
            f": {entry['why']}" for entry in status.get("queue", ())[:1] if entry.get("why")
        )
        lines.append(
            f"not yet safe: {show.counted(status['queue_length'], 'operation')}, "
            f"{show.size(status['queue_bytes'])}, the oldest {age} old{why}"
        )
    is_safe = not lines
    pace = status.get("pace") or {}
    if pace.get("falls_behind"):
        lines.append(
            f"the drain does NOT KEEP UP: {pace['in_per_s']:.1f} operations a second come, "
            f"{pace['out_per_s']:.1f} go, "
            f"and {status['queue_length']} wait"
        )
    if health["state"] != "ok":
        said = f" ({show.printable(health['why'])})" if health["why"] else ""
        lines.append(
            f"the backing directory {HEALTH_TEXT.get(health['state'], health['state'])}{said}"
        )
    if health.get("problem"):
        lines.append(show.printable(health["problem"]))
    unclosed = (
        " (files that are open are safe when they are closed)" if status["open_files"] else ""
    )
    if is_safe:  # also where the storage has trouble with what nobody wants any more
        lines.append(f"safe: everything that was closed is on the backing directory{unclosed}")
    return lines


def _long_written(status: show.Json) -> list[str]:
    """Files that are not published, as somebody has been at them for long: others may have closed
    them meanwhile.
    """
    now = time.time()
    long = [one for one in status.get("being_written", ()) if now - one["since"] >= LONG_WRITTEN_S]
    return [
        f"{show.printable(one['path'])} has been written for {show.duration(now - one['since'])}, "
        f"and is safe when it is closed{_writers(one)}"
        for one in long[:WAITING_LINES_MAX]
    ]


def _writers(one: show.Json) -> str:
    who = (
        f"process {writer['pid']} ({show.printable(writer['command'] or 'gone')})"
        for writer in one["writers"]
    )
    return f": {', '.join(who)}" if one["writers"] else ""


def _who_waits(status: show.Json) -> list[str]:
    """Programs that stand still now: more urgent than what is not safe yet."""
    lines = []
    if status["ram"]["waiting_writers"]:
        lines.append(
            f"STANDING STILL: {status['ram']['waiting_writers']} writers wait for room in the "
            "RAM tier"
        )
    waiting = status.get("waiting", ())
    lines += [_waiting(one) for one in waiting[:WAITING_LINES_MAX]]
    if len(waiting) > WAITING_LINES_MAX:
        lines.append(f"… and {len(waiting) - WAITING_LINES_MAX} more wait")
    lines += [_call(one) for one in status.get("waiting_calls", ())[:WAITING_LINES_MAX]]
    return lines


def _call(one: show.Json) -> str:
    who = (
        f" (process {one['pid']}, {show.printable(one['command'] or 'gone')})" if one["pid"] else ""
    )
    return (
        f"{show.printable(one['path'] or 'the mount')}{who} waits in {one['call']} for "
        f"{show.duration(one['waited_s'])}"
    )


def _waiting(one: show.Json) -> str:
    who = (
        f" (process {one['pid']}, {show.printable(one['command'] or 'gone')})" if one["pid"] else ""
    )
    age = show.duration(max(0.0, time.time() - one["since"]))
    return (
        f"{show.printable(one['path'])}{who} has waited {age} for "
        f"{show.size(one['wanted_bytes'])} to {one['purpose']}: {one['reason']}"
    )


def _guarded(held: show.Json) -> str:
    """One checkpoint that was deleted and stays."""
    now = time.time()
    age = show.duration(max(0.0, now - held["since"]))
    rest = show.duration(max(0.0, held["until"] - now))
    where = f", as {show.printable(held['kept_as'])}" if held["kept_as"] else ""
    name = f"{show.printable(held['path'])} ({show.size(held['size'])}{where})"
    return (
        f"{name} was deleted {age} ago and is kept for at most {rest}: "
        f"{show.printable(held['why'])}; `acpfs-ctl release` lets it go"
    )


def print_queue(status: show.Json) -> None:
    """The oldest operations, as a table."""
    now = time.time()
    rows = (
        (
            show.state(entry),
            entry["operation"],
            show.size(entry["size"]),
            show.duration(entry["age_s"]),
            str(entry["tries"]),
            show.last_error(entry),
            f"in {show.duration(max(0.0, entry['next_attempt'] - now))}"
            if entry["next_attempt"]
            else "",
            entry.get("why", ""),
            show.printable(entry["name"]),
        )
        for entry in status["queue"][:QUEUE_ROWS_MAX]
    )
    headings = (
        "state",
        "operation",
        "size",
        "age",
        "tries",
        "last error",
        "next try",
        "why",
        "name",
    )
    show.table(headings, rows, numbers=("size", "age", "tries"))
    more = status["queue_length"] - min(QUEUE_ROWS_MAX, len(status["queue"]))
    if more > 0:
        click.echo(f"… and {more} more")
