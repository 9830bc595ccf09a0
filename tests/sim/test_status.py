"""Who waits for whom is named, and what is said to be persisted is compared with what is."""

from __future__ import annotations

import pytest

from tests.sim.oracles import Told
from tests.sim.status import chain, judge_persisted
from tests.sim.trace import Finding


def test_a_circle_of_waits_is_named() -> None:
    assert chain("p0", ["p0"], ["p0"]) == "in a circle, p0 waits for p0"
    found = chain("p0", ["p0", "p1"], ["p0", "p1"])
    assert found == "in a circle, p0 waits for p1 waits for p0"


def test_a_wait_for_somebody_who_does_not_wait_is_no_circle() -> None:
    assert chain("p0", ["p0"], ["p1"]) == "p0 waits for p1, who does not wait"


def test_a_wait_for_nobody_is_told_as_that() -> None:
    assert chain("p0", ["p0"], []) == "p0, and for nobody"


def test_a_wait_that_ended_before_all_was_there_is_found() -> None:
    told = Told(b"p0/", {})
    told.begin({b"p0/": b""})
    told.end()
    with pytest.raises(Finding, match="the storage shows moment 0"):
        judge_persisted([told], [1], {}, {})
    judge_persisted([told], [1], {b"p0/": b""}, {b"p0/": b""})
    with pytest.raises(Finding, match="POWER"):
        judge_persisted([told], [1], {b"p0/": b""}, {})
