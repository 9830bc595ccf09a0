"""A bar chart as text and as SVG, without a library: one group of bars per thing measured, one bar
per place.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

Groups = list[tuple[str, dict[str, float]]]
"""(name of the group, value by place), in the order in which they are drawn."""
TEXT_WIDTH = 50
COLOURS = ("#b4552d", "#8a8a8a", "#2d6fb4", "#3c8d40", "#7a4fa3", "#c2a83e")
BAR = 15
GAP = 12
LEFT = 190
WIDTH = 560
TOP = 44


def text(groups: Groups, unit: str = "s") -> list[str]:
    """Lines of text."""
    longest = (
        max((value for _name, values in groups for value in values.values()), default=0.0) or 1.0
    )
    name_width = max(len(name) for name, _values in groups)
    place_width = max(len(place) for _name, values in groups for place in values)
    lines = []
    for name, values in groups:
        for number, (place, value) in enumerate(values.items()):
            bar = "█" * max(1, round(value / longest * TEXT_WIDTH))
            lines.append(
                f"{'' if number else name:<{name_width}}  {place:<{place_width}}  {bar} "
                f"{value:.2f} {unit}"
            )
    return lines


def svg(title: str, groups: Groups, path: Path, unit: str = "s") -> None:
    """The same as a picture."""
    longest = (
        max((value for _name, values in groups for value in values.values()), default=0.0) or 1.0
    )
    places = list(dict.fromkeys(place for _name, values in groups for place in values))
    parts = [f'<text x="10" y="20" font-size="15" font-weight="bold">{escape(title)}</text>']
    y = TOP
    for name, values in groups:
        parts.append(f'<text x="10" y="{y + BAR}">{escape(name)}</text>')
        for place, value in values.items():
            length = max(1.0, value / longest * WIDTH)
            colour = COLOURS[places.index(place) % len(COLOURS)]
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 2}" '
                f'fill="{colour}"/>'
            )
            parts.append(
                f'<text x="{LEFT + length + 5:.1f}" y="{y + BAR - 4}">{value:.2f} '
                f"{escape(unit)}</text>"
            )
            y += BAR
        y += GAP
    x = LEFT
    for place in places:
        parts.append(
            f'<rect x="{x}" y="{y}" width="10" height="10" '
            f'fill="{COLOURS[places.index(place) % len(COLOURS)]}"/>'
        )
        parts.append(f'<text x="{x + 15}" y="{y + 10}">{escape(place)}</text>')
        x += 40 + 7 * len(place)
    size = f'width="{LEFT + WIDTH + 90}" height="{y + 24}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    )
    path.write_text(
        "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"])
        + "\n",
        encoding="utf-8",
    )
