"""What a pointer on the backing directory names keeps its name while the change of that pointer is
withheld.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

import pytest

from acpfs.backing.member_records import ANYTHING
from acpfs.types import Ino
from acpfs.writeback.log.ops import Op
from acpfs.writeback.log.stages import Aside
from acpfs.writeback.log.verdicts import Why
from acpfs.writeback.members.gate import STANDING_MAX
from acpfs.writeback.order.standing_pointers import TEXT_BYTES_MAX
from tests.writeback.conftest import Run
from tests.writeback.test_cluster import let_pass
from tests.writeback.world import World

pytestmark = pytest.mark.clause("S408")
OLD = "run/step-7"


@pytest.fixture
def saved(world: World, run: Run) -> World:
    world.mkdir("run")
    world.mkdir(OLD)
    world.store(f"{OLD}/x", b"7")
    run(world.drain)
    return world


def say(world: World, run: Run, text: bytes, path: str = "run/latest") -> None:
    """It is there."""
    world.store(path, text)
    run(world.drain)
    world.engine.gate.begin()


def withhold(world: World, run: Run, *ops: Op, lost: bool = False) -> None:
    """`lost`: what they wait for is, and later pointers are free (S164)."""
    run(world.run_for, 1.0)
    for gated in world.engine.gate.gated():
        if gated.op in ops and not gated.op.withheld:
            gated.of_what_is_lost = lost
            assert world.engine.gate.withholds(gated)


def pass_all_but(world: World, run: Run, withheld: Iterable[Op]) -> None:
    for gated in world.engine.gate.gated():
        if gated.op not in withheld:
            world.engine.gate.passes(gated)
    run(world.run_for, 1.0)


def move(world: World, source: str, target: str) -> Op:
    """By somebody who says whom it needs: nobody that others wait for."""
    world.log.needs.tell(world.inos[source], ("b",))
    return world.rename(source, target)


def goes_on(world: World, run: Run) -> None:
    """The missing node is back."""
    for gated in world.engine.gate.withheld():
        world.engine.gate.frees(gated)
    let_pass(world)
    run(world.drain)
    assert world.lower.visible() == world.application_view()


TEXTS = [
    (b"step-7", True),
    (b"step-7\n", True),
    (b"/mnt/acp/run/step-7/x", True),
    (b"7", True),
    (b'{"iteration": 7}', True),
    (b"step-70", False),
    (b"laststep-7", False),
    (b"step-5", False),
    (b"step-9.of-7", False),
    (b"70", False),
    (b"", False),
]


@pytest.mark.parametrize(("text", "named"), TEXTS)
def test_a_directory_keeps_its_name_where_the_pointer_names_it_and_only_there(
    saved: World, run: Run, text: bytes, named: bool
) -> None:
    """Also where its writer named the nodes that it needs: `latest` of another writer led to
    nothing.
    """
    say(saved, run, text)
    withheld = saved.store("run/latest", b"step-9")
    withhold(saved, run, withheld)
    moved = move(saved, OLD, "run/step-7.before")
    pass_all_but(saved, run, [withheld])
    assert (b"run/step-7/x" in saved.lower.visible()) is named
    assert saved.lower.visible()[b"run/latest"] == text
    if named:
        assert saved.engine._order.why(moved) is Why.NAMED
    goes_on(saved, run)


@pytest.mark.clause("S164")
def test_so_it_is_where_the_change_waits_for_what_is_lost(saved: World, run: Run) -> None:
    """It may never come; pointers that were closed later are free, and what the old one names
    stays.
    """
    say(saved, run, b"step-7")
    withheld = saved.store("run/latest", b"step-9")
    withhold(saved, run, withheld, lost=True)
    move(saved, OLD, "run/step-7.before")
    saved.mkdir("run/step-10")
    saved.store("run/step-10/.metadata", b"10")
    pass_all_but(saved, run, [withheld])
    assert {b"run/step-7/x", b"run/step-10/.metadata"} <= set(saved.lower.visible())
    goes_on(saved, run)


def test_what_is_taken_over_has_its_temporary_name_taken(saved: World, run: Run) -> None:
    """As the last checkpoint of a job is: a number in a temporary name is none that the pointer
    names.
    """
    say(saved, run, b"step-1")
    withheld = saved.store("run/latest", b"step-5")
    withhold(saved, run, withheld)
    saved.mkdir("run/step-7.gasp-1.tmp")
    saved.store("run/step-7.gasp-1.tmp/x", b"new")
    move(saved, OLD, "run/step-7.before-gasp-1")
    move(saved, "run/step-7.gasp-1.tmp", OLD)
    pass_all_but(saved, run, [withheld])
    assert saved.lower.visible()[b"run/step-7/x"] == b"new"
    goes_on(saved, run)


def test_a_symbolic_link_names_what_it_leads_to(saved: World, run: Run) -> None:
    saved.symlink(b"step-7", "run/latest")
    run(saved.drain)
    saved.engine.gate.begin()
    withheld = saved.unlink("run/latest")
    withhold(saved, run, withheld)
    assert withheld.withheld
    move(saved, OLD, "run/step-7.before")
    pass_all_but(saved, run, [withheld])
    assert b"run/step-7/x" in saved.lower.visible()


@pytest.mark.parametrize("why", ["unreadable", "large"])
@pytest.mark.parametrize(("path", "near"), [("run/latest", True), ("other/latest", False)])
def test_what_nobody_can_read_may_name_what_is_near_it(
    saved: World, run: Run, why: str, path: str, near: bool
) -> None:
    saved.mkdir("other")
    say(saved, run, b"x" * (TEXT_BYTES_MAX + 1) if why == "large" else b"step-1", path)

    def fault(label: str, lower_path: tuple[bytes, ...]) -> None:
        if why == "unreadable" and label == "open" and lower_path[-1] == b"latest":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    saved.lower.fault = fault
    withheld = saved.store(path, b"step-9")
    withhold(saved, run, withheld)
    move(saved, OLD, "run/step-7.before")
    pass_all_but(saved, run, [withheld])
    assert (b"run/step-7/x" in saved.lower.visible()) is near
    goes_on(saved, run)


def test_between_two_changes_that_wait_it_may_name_what_is_near_it(saved: World, run: Run) -> None:
    say(saved, run, b"step-1")
    changes: list[Op] = []
    for step in (b"step-7", b"step-9"):
        temporary = f"run/latest.tmp-{len(changes)}"
        saved.store(temporary, step)
        changes.append(saved.rename(temporary, "run/latest"))
        withhold(saved, run, *changes)
    move(saved, OLD, "run/step-7.before")
    pass_all_but(saved, run, changes)
    assert b"run/step-7/x" in saved.lower.visible()
    goes_on(saved, run)
    leads = [
        b"run/step-7/x" in seen
        for seen in saved.lower.visible_history
        if seen.get(b"run/latest") == b"step-7"
    ]
    assert all(leads)


@pytest.mark.clause("S161")
def test_saves_go_on_by_way_of_temporary_names_whatever_waits(saved: World, run: Run) -> None:
    """A file that gets another name waits for no pointer of which nobody knows what it says: RAM
    would fill up.
    """
    saved.mkdir("run/last")
    saved.store("run/last/.metadata", b"x" * (TEXT_BYTES_MAX + 1))
    say(saved, run, b"step-7")
    changes = [saved.store("run/last/.metadata", b"x")]
    for step in (b"step-8", b"step-9"):
        saved.store(f"run/latest.tmp-{len(changes)}", step)
        changes.append(saved.rename(f"run/latest.tmp-{len(changes)}", "run/latest"))
    withhold(saved, run, *changes)
    saved.store("run/step-7/y.tmp", b"y")
    saved.rename("run/step-7/y.tmp", "run/step-7/y")
    pass_all_but(saved, run, changes)
    assert b"run/step-7/y" in saved.lower.visible()
    goes_on(saved, run)


@pytest.mark.clause("S416")
@pytest.mark.parametrize(("path", "goes"), [("run/last", False), (OLD, True)])
def test_a_large_pointer_keeps_what_lies_beside_it(
    saved: World, run: Run, path: str, goes: bool
) -> None:
    saved.mkdir("run/last")
    saved.store("run/last/x", b"")
    saved.mkdir("run/step-10")
    say(saved, run, b"x" * (TEXT_BYTES_MAX + 1), "run/last/.metadata")
    withheld = saved.store("run/last/.metadata", b"x")
    withhold(saved, run, withheld, lost=True)
    saved.store("run/last/index.json", b"")
    saved.store("run/last/.metadata2", b"")
    saved.store("run/step-10/.metadata", b"")
    saved.unlink(f"{path}/x")
    pass_all_but(saved, run, [withheld])
    assert (f"{path}/x".encode() not in saved.lower.visible()) is goes
    goes_on(saved, run)


def test_nothing_is_read_while_nothing_takes_a_name(saved: World, run: Run) -> None:
    say(saved, run, b"step-7")
    withheld = saved.store("run/latest", b"step-9")
    withhold(saved, run, withheld)
    saved.store("run/other", b"1")
    pass_all_but(saved, run, [withheld])
    assert (saved.engine._order.standing.wanted, saved.engine._order.standing._said) == (set(), {})
    assert Ino(1) == saved.inos[""]


def publish(world: World, checkpoint: str, content: bytes = b"new") -> Op:
    """The operation that makes it visible."""
    world.mkdir(f"{checkpoint}.tmp")
    world.store(f"{checkpoint}.tmp/x", content)
    return move(world, f"{checkpoint}.tmp", checkpoint)


@pytest.mark.clause("S161", "S416")
@pytest.mark.parametrize(
    ("later", "goes"),
    [
        ("", False),
        ("other/step-9", False),
        ("other/step-9/.metadata", False),
        ("run/step-9", True),
        ("run/step-9/.metadata", True),
        ("run/latest", True),
        ("run/deep/er/.metadata", False),
    ],
)
def test_what_replaces_a_withheld_checkpoint_is_a_later_one_of_its_run(
    saved: World, run: Run, later: str, goes: bool
) -> None:
    """Another run's pointer says nothing of this one: step-8 never came, step-7 was removed, and no
    checkpoint was left.
    """
    for directory in ("other", "other/step-9", "run/deep", "run/deep/er"):
        saved.mkdir(directory)
    run(saved.drain)
    saved.engine.gate.begin()
    withheld = publish(saved, "run/step-8")
    withhold(saved, run, withheld, lost=True)
    if later.endswith("step-9"):
        target = later if later.startswith("run") else "other/step-10"
        publish(saved, target)
    elif later:
        if later.startswith("run/step-9"):
            saved.mkdir("run/step-9")
        saved.store(later, b"")
    saved.unlink(f"{OLD}/x")
    pass_all_but(saved, run, [withheld])
    assert (b"run/step-7/x" not in saved.lower.visible()) is goes
    goes_on(saved, run)


@pytest.mark.clause("S161", "S416")
@pytest.mark.parametrize(("text", "goes"), [(b"step-7", False), (b"step-5", True)])
def test_what_the_old_pointer_names_stays_whatever_came_later(
    saved: World, run: Run, text: bytes, goes: bool
) -> None:
    say(saved, run, text)
    withheld = saved.store("run/latest", b"step-9")
    withhold(saved, run, withheld, lost=True)
    saved.mkdir("run/step-9")
    saved.store("run/step-9/.metadata", b"")
    saved.unlink(f"{OLD}/x")
    saved.rmdir(OLD)
    pass_all_but(saved, run, [withheld])
    assert b"run/step-9/.metadata" in saved.lower.visible()
    assert (b"run/step-7/x" not in saved.lower.visible()) is goes
    goes_on(saved, run)


@pytest.mark.clause("S160", "S416")
def test_others_are_told_of_a_pointer_to_come_until_its_run_has_a_later_one(
    saved: World, run: Run
) -> None:
    """Their removals wait for it: another run's pointer does not say that what it replaces may
    go.
    """
    gate = saved.engine.gate
    saved.mkdir("other")
    run(saved.drain)
    gate.begin()
    now = 1e12
    before = gate.pointers(now)
    withheld = publish(saved, "run/step-8")
    withhold(saved, run, withheld, lost=True)
    publish(saved, "other/step-1")
    pass_all_but(saved, run, [withheld])
    assert b"other/step-1/x" in saved.lower.visible()
    assert (before, gate.pointers(now)) == (now, withheld.logged_at)
    publish(saved, "run/step-9")
    pass_all_but(saved, run, [withheld])
    assert gate.pointers(now) == now


@pytest.mark.clause("S160", "S416")
def test_others_are_told_of_the_change_of_a_pointer_until_it_is_there(
    saved: World, run: Run
) -> None:
    """What it says until then they may be about to remove."""
    say(saved, run, b"step-7")
    withheld = saved.store("run/latest", b"step-9")
    withhold(saved, run, withheld, lost=True)
    publish(saved, "run/step-10")
    pass_all_but(saved, run, [withheld])
    assert b"run/step-10/x" in saved.lower.visible()
    assert saved.engine.gate.pointers(1e12) == withheld.logged_at


@pytest.mark.clause("S463")
@pytest.mark.parametrize("lost", [False, True])
def test_others_are_told_which_pointers_are_to_be_changed(
    saved: World, run: Run, lost: bool
) -> None:
    """Apart where what they wait for is lost. A pointer that is not there yet names nothing; but
    where a loss is forgotten the oldest is to be made first, also there.
    """
    saved.store("run/latest_other", b"step-7")
    say(saved, run, b"step-7")
    gate = saved.engine.gate
    withheld = saved.store("run/latest", b"step-9")
    first = saved.store("run/step-7/.metadata", b"")
    withhold(saved, run, withheld, first, lost=lost)
    saved.store("run/latest.tmp", b"step-10")
    behind = saved.rename("run/latest.tmp", "run/latest")
    pass_all_but(saved, run, [withheld, first])
    gate.pointers(1e12)
    assert (withheld.withheld, first.withheld, behind.aside) == (True, True, Aside.HELD)
    to_come = {"run/step-7/.metadata": first.logged_at} if lost else {}
    assert gate.standing()[lost] == {"run/latest": withheld.logged_at, **to_come}
    assert gate.standing()[not lost] == {}
    goes_on(saved, run)
    assert gate.standing() == ({}, {})


@pytest.mark.clause("S164", "S409")
def test_pointers_that_are_to_come_are_told_as_far_as_there_is_room(saved: World, run: Run) -> None:
    """One that many checkpoints name before those of single ones; and never is it said that it may
    be any, for which who needs room would wait.
    """
    gate = saved.engine.gate
    numbers = range(100, 100 + STANDING_MAX)
    for number in numbers:
        saved.mkdir(f"run/step-{number}")
    run(saved.drain)
    gate.begin()
    steps = [saved.store(f"run/step-{number}/.metadata", b"") for number in numbers]
    latest = saved.store("run/latest", b"step-9")
    withhold(saved, run, *steps, latest, lost=True)
    gate.pointers(1e12)
    standing, of_lost = gate.standing()
    assert (standing, len(of_lost), ANYTHING in of_lost) == ({}, STANDING_MAX, False)
    assert of_lost["run/latest"] == latest.logged_at
    goes_on(saved, run)


@pytest.mark.clause("S463")
def test_where_too_many_are_to_be_changed_it_may_be_any(saved: World, run: Run) -> None:
    paths = [f"run/latest_{number}" for number in range(STANDING_MAX + 1)]
    for path in paths:
        saved.store(path, b"")
    run(saved.drain)
    saved.engine.gate.begin()
    changes = [saved.store(path, b"step-9") for path in paths]
    withhold(saved, run, *changes)
    saved.engine.gate.pointers(1e12)
    assert saved.engine.gate.standing() == ({ANYTHING: changes[0].logged_at}, {})
    goes_on(saved, run)
