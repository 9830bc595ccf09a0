"""Who is asked for which part of a file that several members read, and what becomes of it when one
of them does not answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from acpfs.backing.lower import LowerStat
from acpfs.exchange.beside import MemberFailedError
from acpfs.exchange.exchange_records import (
    PART_BYTES,
    Availability,
    Has,
    MemberAddress,
    VersionName,
)
from acpfs.filesystem.content.from_members import (
    GROUP_MAX,
    RESTS_S,
    FromMembers,
    Members,
    group_of,
    owners,
)
from tests.rig.runtime import REAL, runtime_of

clause = pytest.mark.clause
FILE = VersionName(b"run/model", 7, 100 * PART_BYTES, 11, 13)
NODES = [f"n{number}" for number in range(8)]


def address(node: str) -> MemberAddress:
    return MemberAddress(node, ("192.0.2.1",), 1, "0" * 64)


def seen(file: VersionName) -> LowerStat:
    """How the storage shows it."""
    return LowerStat(file.ino, 0o100644, 1, 0, 0, 0, file.size, 0, 0, file.mtime_ns, file.ctime_ns)


class Time:
    """Stands still."""

    def __init__(self) -> None:
        self.s = 100.0

    def now(self) -> float:
        return self.s


def of(others: Others, time: Time | None = None) -> FromMembers:
    """The file, for `n0`."""
    return FromMembers(others, FILE, runtime_of((time or Time()).now))


class Others:
    """Members that answer as they are told to; their ranges are descriptors 1000 and up."""

    def __init__(self, **holdings: Availability | None) -> None:
        """None: that one does not answer."""
        self.holdings = holdings
        self.asked: list[str] = []
        self.got: list[tuple[str, int]] = []
        self.node = "n0"

    def others(self) -> Sequence[MemberAddress]:
        return [address(node) for node in self.holdings]

    def ask(self, to: MemberAddress, _file: VersionName) -> Callable[[], Availability]:
        self.asked.append(to.node)

        def answer() -> Availability:
            holding = self.holdings[to.node]
            if holding is None:
                raise MemberFailedError("silent")
            return holding

        return answer

    def get(self, to: MemberAddress, _file: VersionName, offset: int, _size: int) -> int:
        self.got.append((to.node, offset))
        holding = self.holdings[to.node]
        if holding is None:
            raise MemberFailedError("silent")
        return 1000 if holding.has is not Has.NO else -1

    def took(self, node: str, size: int) -> None:
        """Nothing."""


@clause("S541")
def test_all_agree_who_owns_a_part_and_each_owns_its_share() -> None:
    first = [owners(FILE, part, NODES)[0] for part in range(4000)]
    assert first == [owners(FILE, part, reversed(NODES))[0] for part in range(4000)]
    shares = Counter(first)
    assert set(shares) == set(NODES)
    assert max(shares.values()) < 1.5 * min(shares.values())


@clause("S541")
def test_when_a_member_goes_only_its_parts_get_another_owner() -> None:
    for part in range(500):
        before = owners(FILE, part, NODES)
        after = owners(FILE, part, [node for node in NODES if node != "n3"])
        assert after == [node for node in before if node != "n3"]


@clause("S541")
def test_another_version_has_other_owners() -> None:
    other = VersionName(FILE.path, FILE.ino, FILE.size, FILE.mtime_ns + 1, FILE.ctime_ns)
    assert [owners(FILE, part, NODES)[0] for part in range(64)] != [
        owners(other, part, NODES)[0] for part in range(64)
    ]


@clause("S541")
def test_groups_are_the_same_for_all_their_members() -> None:
    nodes = [f"m{number:04}" for number in range(100)]
    for node in nodes:
        group = group_of([one for one in nodes if one != node], node)
        assert node in group
        assert len(group) <= GROUP_MAX
        for other in group:
            assert group_of([one for one in nodes if one != other], other) == group


@clause("S540")
def test_who_has_it_whole_is_asked_for_all() -> None:
    others = Others(
        n1=Availability(Has.WHOLE), n2=Availability(Has.COMING), n3=Availability(Has.NO)
    )
    members = of(others)
    for part in range(100):
        found = members.get(seen(FILE), part * PART_BYTES, 1 << 20)
        assert found is not None
        assert found.node == "n1"
    assert others.asked == ["n1", "n2", "n3"], "once, whatever is read"


@clause("S540")
def test_two_that_have_it_share_the_work() -> None:
    others = Others(n1=Availability(Has.WHOLE), n2=Availability(Has.WHOLE))
    members = of(others)
    for part in range(100):
        members.get(seen(FILE), part * PART_BYTES, 1 << 20)
    assert {node for node, _offset in others.got} == {"n1", "n2"}


@clause("S541")
def test_parts_that_are_this_members_own_are_read_from_the_storage() -> None:
    others = Others(n1=Availability(Has.COMING), n2=Availability(Has.COMING))
    members = of(others)
    own = members.own_parts(100)
    for part in range(100):
        found = members.get(seen(FILE), part * PART_BYTES, 1 << 20)
        assert (found is None) == (part in own)
        assert found is None or found.node == owners(FILE, part, ["n0", "n1", "n2"])[0]
    assert 15 < len(own) < 55


@clause("S541")
def test_what_a_reader_has_already_is_not_read_again() -> None:
    """Also where it belongs to this member: who came later."""
    others = Others(n1=Availability(Has.COMING, parts=(1 << 100) - 1))
    members = of(others)
    assert members.own_parts(100) == []
    assert all(members.get(seen(FILE), part * PART_BYTES, 1) is not None for part in range(100))


@clause("S541")
def test_who_begins_later_takes_over_his_share() -> None:
    others = Others(n1=Availability(Has.NO))
    members = of(others)
    assert members.get(seen(FILE), 0, 1) is None
    assert others.got == []
    before = members.changes
    members.joined("n1")
    assert members.changes != before
    assert 25 < len(members.own_parts(100)) < 75


@clause("S542")
def test_a_member_that_does_not_answer_costs_one_try() -> None:
    others = Others(n1=Availability(Has.WHOLE), n2=Availability(Has.NO))
    time = Time()
    members = of(others, time)
    assert members.get(seen(FILE), 0, 1) is not None
    others.holdings["n1"] = None
    assert [members.get(seen(FILE), part * PART_BYTES, 1) for part in range(10)] == [None] * 10
    assert len(others.got) == 2
    members.joined("n1")
    assert members.get(seen(FILE), 0, 1) is None, "it rests"
    others.holdings["n1"] = Availability(Has.WHOLE)
    time.s += RESTS_S
    assert members.get(seen(FILE), 0, 1) is not None


@clause("S542")
def test_one_that_is_silent_when_it_is_asked_is_asked_for_nothing() -> None:
    others = Others(n1=None, n2=Availability(Has.WHOLE))
    members = of(others)
    assert all(members.get(seen(FILE), part * PART_BYTES, 1) is not None for part in range(20))
    assert {node for node, _offset in others.got} == {"n2"}


@clause("S540")
def test_what_has_left_ram_there_is_not_asked_for_again() -> None:
    others = Others(n1=Availability(Has.WHOLE))
    members = of(others)
    assert members.get(seen(FILE), 0, 1) is not None
    others.holdings["n1"] = Availability(Has.NO)
    assert members.get(seen(FILE), 0, 1) is None
    assert members.get(seen(FILE), 0, 1) is None
    assert len(others.got) == 2


@clause("S543")
@pytest.mark.parametrize("field", ["ino", "size", "mtime_ns", "ctime_ns"])
def test_a_file_that_is_another_one_by_now_is_read_from_the_storage(field: str) -> None:
    others = Others(n1=Availability(Has.WHOLE))
    now = seen(FILE)._replace(**{field: 99})
    assert of(others).get(now, 0, 1) is None
    assert others.asked == []


def test_without_others_nobody_is_asked() -> None:
    assert not Members(None, REAL).are_there()
    assert Members(None, REAL).of((b"model",), FILE.identity()) is None
    assert not Members(Others(), REAL).are_there()
    made = Members(Others(n1=Availability(Has.NO)), REAL).of((b"run", b"model"), FILE.identity())
    assert made is not None
