"""How many opens went which way, and why, as `status` says it."""

from __future__ import annotations

import pytest

from acpfs.cli.verbs.status import lanes_line

pytestmark = pytest.mark.clause("S505")
OPEN = {"passthrough": 1, "direct": 2}


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({}, ""),
        ({"passthrough": 3}, "; opens so far: passthrough 3"),
        ({"passthrough": 0, "not in RAM": 1}, "; opens so far: direct 1 (1: not in RAM)"),
        (
            {"larger than RAM": 1, "passthrough": 7, "not in RAM": 4, "partly in RAM": 0},
            "; opens so far: passthrough 7, direct 5 (4: not in RAM; 1: larger than RAM)",
        ),
    ],
)
def test_each_lane_has_its_opens_and_the_daemons_has_the_reasons(
    choices: dict[str, int], expected: str
) -> None:
    line = lanes_line({"lanes": OPEN, "lane_choices": choices})
    assert line == "passthrough 1, direct 2 open now" + expected
