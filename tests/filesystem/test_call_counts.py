"""How many functions of acpfs a call goes through: what each feature adds to it shows here.

Counts, which no load of the machine changes. Who needs one more says here what it is for; who finds
a way round one lowers the number.
"""

from __future__ import annotations

from bench.calls import count_at_once

CALLS_MAX = {"write of 1 MiB": 78, "close": 190, "create to stat": 430, "unlink": 101}


def test_calls_go_through_no_more_functions_than_before() -> None:
    counts = count_at_once({})
    found = {what: counts[what]["calls"] for what in CALLS_MAX}
    assert all(found[what] <= most for what, most in CALLS_MAX.items()), found
