"""Savers whose storage is slow or stands still, as the coordinator sees them: whoever writes, or
alone has something, is waited for.
"""

from __future__ import annotations

import pytest

from acpfs.training.coordinator.phases import State
from tests.training.simulated_member import job
from tests.training.test_phases import LIMITS, Desk

pytestmark = pytest.mark.clause("T164")
USUAL_S = {
    State.STOPPING: LIMITS.stuck_s,
    State.SETTLING: LIMITS.settle_s,
    State.SAVING: LIMITS.save_s,
    State.PUBLISHING: LIMITS.publish_s,
}


@pytest.mark.parametrize("writes", [True, False])
def test_a_saver_whose_bytes_move_is_waited_for_whoever_has_what_it_has(writes: bool) -> None:
    desk = Desk(job(holders={"all": (0, 1, 2, 3)})).begin()
    desk.kill(0)
    desk.later(0.2)
    while desk.phases.state is not State.SAVING:
        desk.let(*next(one for one in desk.waiting()))
    desk.down[1].clear()  # it writes
    for number in range(1, 4):
        desk.later(LIMITS.save_s - 10)
        if writes:
            desk.members[1].moved = number << 20
    assert (
        (desk.phases.generation, desk.phases.state) == (1, State.SAVING)
        if writes
        else desk.phases.generation > 1
    )


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("state", USUAL_S)
def test_a_rank_that_speaks_and_alone_has_something_may_stand_still_for_ten_minutes(
    state: State, copies: int
) -> None:
    """In a storage: it is where it was when that comes back, and its gasp is whole."""
    holders = {"a": (0, 1), "b": (2, 3)} if copies == 1 else {"all": (0, 1, 2, 3)}
    desk = Desk(job(holders=holders)).begin()
    desk.kill(0)
    desk.later(0.2)
    while desk.phases.state is not state:
        desk.let(*next(one for one in desk.waiting()))
    kept = list(desk.down[1])
    desk.down[1].clear()
    desk.drain()
    for _ in range(int(USUAL_S[state] + LIMITS.only_holder_s) - 5):
        desk.later(1)
        desk.drain()
    assert (desk.phases.state is state and not desk.phases.lost.keys() - {0}) is (copies == 1)
    if copies == 1:
        desk.down[1].extend(kept)
        desk.end()
        assert desk.published[0].manifest.generation == 1
        assert desk.published[0].manifest.lost == (0,)
