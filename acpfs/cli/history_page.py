"""The page of `acpfs-ctl history --html`: one file, with plots drawn in it, that needs nothing else
to be looked at.
"""

from __future__ import annotations

import html as escaping
import time
from collections.abc import Sequence
from typing import Any

from acpfs.cli import show
from acpfs.cli.verbs.history import DURATIONS, OF_CHECKPOINTS, what

WIDTH = 900
HEIGHT = 180
MARGIN = 50
STYLE = (
    "body{font:14px sans-serif;margin:2em}td,th{text-align:left;padding:2px 12px 2px 0}"
    ".n{text-align:right}circle{fill:#36c}.trouble{color:#b00}"
)
CALM = ("checkpoint", "load", "mount")
Entry = dict[str, Any]


def _points(shown: Sequence[Entry], key: str) -> list[tuple[Any, Any]]:
    return [(entry["at"], entry[key]) for entry in shown if entry[key] is not None]


def html(mountpoint: str, entries: Sequence[Entry]) -> str:
    """The whole page."""
    saves, loads = (
        [entry for entry in entries if entry["kind"] == kind] for kind in OF_CHECKPOINTS
    )
    plots = "".join(
        f"<h2>{title}</h2>{_plot(_points(shown, key), unit)}"
        for title, shown, key, unit in (
            ("Save", saves, "save_s", show.duration),
            ("Until persisted", saves, "persist_s", show.duration),
            ("Size", saves, "bytes", show.size),
            ("Load", loads, "load_s", show.duration),
        )
    )
    rows = "".join(_row(entry) for entry in reversed(entries))
    headings = "".join(
        f"<th>{name}</th>"
        for name in ("when", "what", "", "files", "size", "saved in", "persisted in", "loaded in")
    )
    title = f"acpfs on {_safe(mountpoint)}"
    return (
        f"<!doctype html><html><head><meta charset='utf-8'><title>{title}</title>"
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>{len(saves)} checkpoints, {len(loads)} loads, "
        f"{sum(entry['kind'] not in CALM for entry in entries)} other events.</p>{plots}"
        f"<h2>Everything, newest first</h2><table><tr>{headings}</tr>{rows}</table></body></html>\n"
    )


def _plot(points: Sequence[tuple[float, float]], unit: Any) -> str:
    """Points over time; the vertical axis begins at 0."""
    if not points:
        return "<p>None yet.</p>"
    first = min(at for at, _value in points)
    last = max(at for at, _value in points)
    span = max(1.0, last - first)
    most = max(value for _at, value in points) or 1
    dots = ""
    for at, value in points:
        x = MARGIN + (WIDTH - MARGIN) * (at - first) / span
        y = HEIGHT - (HEIGHT - 20) * value / most
        dots += (
            f"<circle r='3' cx='{x:.1f}' cy='{y:.1f}'><title>{_when(at)}: "
            f"{unit(value)}</title></circle>"
        )
    axis = f"<path d='M{MARGIN} 10V{HEIGHT}H{WIDTH}' fill='none' stroke='#888'/>"
    below = HEIGHT + 18
    labels = (
        f"<text x='0' y='24'>{unit(most)}</text><text x='0' y='{HEIGHT}'>0</text>"
        f"<text x='{MARGIN}' y='{below}'>{_when(first)}</text><text x='{WIDTH}' y='{below}' "
        f"text-anchor='end'>{_when(last)}</text>"
    )
    return (
        f"<svg width='{WIDTH + 20}' height='{HEIGHT + 24}' "
        f"font-size='11'>{axis}{labels}{dots}</svg>"
    )


def _row(entry: Entry) -> str:
    if entry["kind"] not in OF_CHECKPOINTS:
        css = "" if entry["kind"] in CALM else " class='trouble'"
        return (
            f"<tr{css}><td>{_when(entry['at'])}</td><td>{_safe(entry['kind'])}</td><td "
            f"colspan='6'>{_safe(entry['text'])}</td></tr>"
        )
    times = "".join(
        f"<td class='n'>{'' if entry[key] is None else show.duration(entry[key])}</td>"
        for key in DURATIONS
    )
    figures = (
        f"<td class='n'>{entry['files']}</td><td class='n'>{show.size(entry['bytes'] or 0)}</td>"
    )
    said = "".join(
        f"<td>{cell}</td>" for cell in (_when(entry["at"]), what(entry), _safe(entry["path"]))
    )
    return f"<tr>{said}{figures}{times}</tr>"


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _safe(text: str) -> str:
    return escaping.escape(show.printable(text))
