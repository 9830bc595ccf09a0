"""What the drill of large files goes by: what was seen on the backing directory, and what was being
written when something died.
"""

from __future__ import annotations

from pathlib import Path

from tests.drill.history import History, State
from tests.drill.spec import Call, bytes_of, digest
from tests.drill.under_way import UnderWay
from tests.drill.verdict import check_mount
from tests.drill.watch import Watch, judged


def called(*words: object, began: float, ended: float, errno: int | None = 0) -> Call:
    return Call(1, words, began, errno, ended)


def whole(what: bytes) -> tuple[str, str]:
    return ("file", digest(what))


def had(*trees: dict[str, bytes]) -> History:
    history = History()
    history.states = [State({path: whole(what) for path, what in tree.items()}) for tree in trees]
    return history


def test_what_was_seen_must_have_been_and_in_that_order() -> None:
    history = had({"a": b"1"}, {"a": b"2"}, {"a": b"2", "b": b"1"})
    assert (
        judged([("a", whole(b"1")), ("b", None), ("a", whole(b"2")), ("b", whole(b"1"))], history)
        == []
    )
    assert "no state had that" in judged([("a", whole(b"3"))], history)[0]
    assert "states [0] had that" in judged([("a", whole(b"2")), ("a", whole(b"1"))], history)[0]
    assert judged([("b", whole(b"1")), ("a", whole(b"1"))], history)
    assert judged([("a", whole(b"3"))], history, lambda path, entry: path == "a") == []


def test_files_that_nobody_decided_about_are_published_in_any_order() -> None:
    history = History({"a": whole(b"1"), "b": whole(b"1")}, {"a": b"1", "b": b"1"})
    for number, path in enumerate(("a", "b")):
        history.follow(
            [
                called("open", path, number, True, began=1.0, ended=2.0),
                called("write", number, 0, 7, 9, began=2.0, ended=3.0),
            ]
        )
    history.lose_writers()
    history.publish_all()
    new = whole(bytes_of(7, 9))
    old = whole(b"1")
    for seen in (
        {"a": old, "b": old},
        {"a": old, "b": new},
        {"a": new, "b": old},
        {"a": new, "b": new},
    ):
        assert history.find(seen) is not None
    assert history.find({"a": new}) is None
    assert judged([("b", new), ("a", old), ("a", new)], history) == []


def test_a_close_without_an_answer_may_not_have_happened_either() -> None:
    history = History({"a": whole(b"1"), "b": whole(b"1")}, {"a": b"1", "b": b"1"})
    for number, path in enumerate(("a", "b")):
        history.follow(
            [
                called("open", path, number, True, began=1.0, ended=2.0),
                called("write", number, 0, 7, 9, began=2.0, ended=3.0),
            ]
        )
    history.follow([called("close", 0, began=4.0, ended=0.0, errno=None)])
    new = whole(bytes_of(7, 9))
    old = whole(b"1")
    history, losses = check_mount(
        history, {"a": new, "b": new}, {"a": bytes_of(7, 9), "b": bytes_of(7, 9)}
    )
    history.lose_writers()
    assert losses == [] == judged([("a", new), ("b", old)], history)
    history.publish_all()
    assert judged([("b", new), ("a", old), ("a", new)], history) == []


def test_a_new_file_that_was_never_written_to_may_be_published_and_no_other() -> None:
    history = History({"old": whole(b"1")}, {"old": b"1"})
    for number, path in enumerate(("new", "half", "old")):
        history.follow([called("open", path, number, True, began=1.0, ended=2.0)])
    history.follow([called("write", 1, 0, 7, 9, began=2.0, ended=3.0)])
    history.lose_writers()
    assert history.find({"old": whole(b"1"), "new": whole(b"")}) is not None
    assert history.find({"old": whole(b"1"), "half": whole(bytes_of(7, 9))}) is None
    assert history.find({"old": whole(b"")}) is None


def test_the_watch_sees_what_a_pointer_names(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("gone")
    watch.look_around()
    (tmp_path / "gone").write_bytes(b"here")
    watch.look_around()
    pointer = ("latest_checkpointed_iteration.txt", whole(b"gone"))
    assert watch.take() == [
        pointer,
        ("gone", None),
        ("gone", whole(b"here")),
        pointer,
        ("gone", whole(b"here")),
    ]
    assert watch.take() == []


def test_a_file_that_is_written_to_again_is_read_again(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    for what in (b"one", b"three"):
        (tmp_path / "f").write_bytes(what)
        watch.look_around()
    assert watch.take() == [("f", whole(b"one")), ("f", whole(b"three"))]


def under_way_at(calls: list[Call], *moments: float) -> list[int | None]:
    under_way = UnderWay()
    under_way.follow(calls)
    for moment in moments:
        under_way.note(moment)
    return under_way.take()


def test_a_file_is_being_written_from_its_first_change_until_its_close() -> None:
    calls = [
        called("open", "a", 0, True, began=1.0, ended=1.1),
        called("write", 0, 0, 1, 100, began=2.0, ended=2.1),
        called("open", "b", 1, False, began=3.0, ended=3.1),
        called("close", 0, began=4.0, ended=4.1),
        called("write", 1, 0, 1, 7, began=5.0, ended=5.1),
        called("close", 1, began=6.0, ended=6.1),
    ]
    assert under_way_at(calls, 0.5, 1.5, 2.5, 4.5, 5.5, 7.0) == [None, 100, 100, None, 7, None]


def test_what_had_no_answer_was_being_written() -> None:
    assert under_way_at([called("store", "a", "", began=1.0, ended=0.0, errno=None)], 0.5, 9.0) == [
        None,
        0,
    ]
