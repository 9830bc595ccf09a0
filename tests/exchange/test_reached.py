"""Where a member is reached, whose key is whose, and what is lacking for an exchange."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from acpfs.backing.identity import Identity
from acpfs.backing.member_records import NodeRecord
from acpfs.config import Settings, validated
from acpfs.errors import ConfigError
from acpfs.exchange.beside import SAID_AGAIN_S, Exchange, ExchangePlace, Lender
from acpfs.exchange.exchange_records import MemberAddress
from acpfs.worker.exchanging import LOOKS_MAX, MemberDirectory, Reached, addresses_of, reached
from acpfs.writeback.members.cluster import Cluster
from tests.rig.runtime import REAL

clause = pytest.mark.clause
WHO = Identity("n1", "5" * 32, -1)
KEY = "a" * 64
RECORD = NodeRecord("n2", addresses=["192.0.2.2"], port=7, key=KEY)


def settings(tmp_path: Path, exchange: str) -> Settings:
    return Settings(backing=tmp_path, mountpoint=tmp_path / "mnt", exchange=exchange)


@clause("S549")
def test_addresses_are_those_that_were_named() -> None:
    assert addresses_of("192.0.2.7") == ["192.0.2.7"]
    assert addresses_of("2001:db8::7") == ["2001:db8::7"]
    assert addresses_of("lo") == ["127.0.0.1"]
    with pytest.raises(OSError, match="interface none7 has no address"):
        addresses_of("none7")


@clause("S549")
def test_a_value_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exchange"):
        validated({"backing": tmp_path, "mountpoint": tmp_path, "exchange": "a b"})


def closed(found: Reached) -> Reached:
    for one in () if found.place is None else found.place.listeners:
        one.close()
    return found


@clause("S539", "S549")
def test_a_member_keeps_its_key(tmp_path: Path) -> None:
    first = closed(reached(settings(tmp_path, "lo"), tmp_path / "run", WHO))
    second = closed(reached(settings(tmp_path, "127.0.0.1"), tmp_path / "run", WHO))
    other = closed(reached(settings(tmp_path, "lo"), tmp_path / "run", replace(WHO, node_id="n3")))
    assert first.addresses == ("127.0.0.1",)
    assert first.port
    assert first.warnings == []
    assert first.key == second.key != other.key


@clause("S549")
@pytest.mark.parametrize("lacks", ["address", "openssl", "off"])
def test_what_is_lacking_is_said_and_no_more(
    tmp_path: Path, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "openssl":
        monkeypatch.setenv("PATH", str(tmp_path))
        assert shutil.which("openssl") is None
    where = {"address": "192.0.2.7", "openssl": "lo", "off": "off"}[lacks]
    found = reached(settings(tmp_path, where), tmp_path / "run", WHO)
    assert (found.place, found.addresses, found.port, found.key) == (None, (), 0, "")
    assert len(found.warnings) == (lacks != "off")
    if lacks == "openssl":
        assert "openssl is not installed" in found.warnings[0]


class Records:
    """What a cluster has read of others, and reads."""

    def __init__(self, *known: NodeRecord) -> None:
        self.known = list(known)
        self.reads: list[tuple[str, Future[NodeRecord | None]]] = []

    def live_records(self) -> list[NodeRecord]:
        return self.known

    def record_anew(self, node: str) -> Future[NodeRecord | None]:
        self.reads.append((node, Future()))
        return self.reads[-1][1]


def directory(records: Records) -> MemberDirectory:
    return MemberDirectory(lambda: cast("Cluster", records), REAL.clock)


@clause("S545")
def test_a_key_is_known_by_the_record_or_by_a_newer_one() -> None:
    records = Records(RECORD)
    members = directory(records)
    assert members.knows("n2", KEY).result(0)
    newer = members.knows("n2", "b" * 64)
    assert not newer.done()
    records.reads.pop()[1].set_result(replace(RECORD, key="b" * 64))
    assert newer.result(0)


@clause("S545")
@pytest.mark.parametrize("answer", [None, RECORD, NodeRecord("n3"), OSError(5, "no")])
def test_a_stranger_is_known_by_no_record(answer: NodeRecord | OSError | None) -> None:
    records = Records()
    known = directory(records).knows("n3", "b" * 64)
    read = records.reads.pop()[1]
    if isinstance(answer, OSError):
        read.set_exception(answer)
    else:
        read.set_result(answer)
    assert not known.result(0)


@clause("S545")
def test_strangers_cost_the_storage_few_questions_and_no_strange_names() -> None:
    records = Records()
    members = directory(records)
    for name in ("../volume", "", "x" * 64, "a/b", ".n2.mark-a"):
        assert not members.knows(name, KEY).result(0)
    assert not members.knows("n3", "").result(0)
    assert records.reads == []
    asked = [members.knows(f"n{number}", KEY) for number in range(LOOKS_MAX + 5)]
    assert len(records.reads) == LOOKS_MAX
    assert [one.result(0) for one in asked[LOOKS_MAX:]] == [False] * 5
    for _node, read in records.reads:
        read.set_result(None)
    assert not any(one.result(0) for one in asked)


def test_only_members_that_say_where_they_are_can_be_asked() -> None:
    members = directory(Records(RECORD, NodeRecord("n3"), replace(RECORD, node="n4", port=0)))
    assert members.others() == [MemberAddress("n2", ("192.0.2.2",), 7, KEY)]


@clause("S546")
def test_bytes_that_were_changed_on_their_way_are_told_of_now_and_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not each time: who changes them could fill the log."""
    place = ExchangePlace("5" * 32, "n1", tmp_path, is_plain=False, listeners=())
    lender: Callable[[], Lender] = cast("Any", None)
    one = Exchange(place, directory(Records(RECORD)), lender, REAL, patience_s=0.3)
    for _each in range(3):
        one._heed({"do": "spoilt", "node": "n2"}, [], lambda *_: True)
    assert caplog.text.count("were changed on their way") == 1
    one._spoilt_at["n2"] -= SAID_AGAIN_S
    one._heed({"do": "spoilt", "node": "n2"}, [], lambda *_: True)
    assert caplog.text.count("were changed on their way") == 2


@clause("S548")
def test_only_members_that_live_have_a_way(tmp_path: Path) -> None:
    place = ExchangePlace("5" * 32, "n1", tmp_path, is_plain=False, listeners=())
    lender: Callable[[], Lender] = cast("Any", None)
    one = Exchange(place, directory(Records(RECORD)), lender, REAL, patience_s=0.3)
    for node, way in (("n2", "tls"), ("n9", "plain"), ("n2", "sealed")):
        one._heed({"do": "linked", "node": node, "way": way}, [], lambda *_: True)
    assert one.ways() == {"n2": "sealed"}


@clause("S542")
def test_who_fails_three_times_is_left_alone_for_a_while(tmp_path: Path) -> None:
    place = ExchangePlace("5" * 32, "n1", tmp_path, is_plain=False, listeners=())
    lender: Callable[[], Lender] = cast("Any", None)
    one = Exchange(place, directory(Records(RECORD)), lender, REAL, patience_s=0.3)
    for _ in range(2):
        one._fails("n2")
        assert [other.node for other in one.others()] == ["n2"]
    one._fails("n2")
    assert one.others() == []
    assert one.counts.failures == 3
