"""Messages survive the way through JSON; what is no message is one clear error, whatever it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acpfs.training.messages import (
    KINDS,
    Beat,
    Gate,
    GateResult,
    Header,
    Hello,
    Manifest,
    Phase,
    Publish,
    Save,
    SavedFile,
    Sent,
    Stop,
    Stopped,
    StoreAsk,
    StoreVerb,
    checkpoint_name,
    decode,
    encode,
)
from acpfs.training.records import MalformedError

HEADER = Header("job", 3, 2, "rank 1")
EXAMPLES = [
    Hello(
        1, 4, "node0", 77, 123456, Gate.EXPLICIT, {"opt0": (1, 3)}, "iter_{step:07d}", 2, "10.0.0.1"
    ),
    Beat(5, 6, Phase.READY, {"world": 17}, long_operation=True, moved=1 << 40),
    Stopped(5, 6, Phase.UPDATING, ("opt0",), GateResult(6, (0.5, float("inf")))),
    Save(6, {"opt0": 1}, (1, 3), "step-6.gasp-4.tmp", "step-6", (0, 2)),
    Publish(
        Manifest(
            "job",
            4,
            6,
            (0,),
            {"opt0": 1},
            (SavedFile("a/b", 9, "00"),),
            {"opt0": "ab"},
            ("node0",),
            {"opt0": {1: "ab", 3: "cd"}},
        ),
        "step-6.gasp-4.tmp",
        "step-6",
    ),
    StoreAsk(1, StoreVerb.ADD, ("counter",), "-1"),
    Stop((0, 2)),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_way(message: object) -> None:
    sent = Sent(HEADER, message)  # type: ignore[arg-type]
    assert decode(encode(sent)) == sent


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not an object"),
        (b'{"kind":"NOSUCH"}', "no known kind"),
        (b'{"kind":["STOP"],"body":{}}', "no known kind"),
        (b'{"kind":"STOP","body":{"lost":[]}}', "Header: job is missing"),
        (
            b'{"kind":"STOP","job":"j","generation":true,"term":0,"sender":"s","body":{"lost":[]}}',
            "generation: True is not a count",
        ),
        (
            b'{"kind":"STOP","job":"j","generation":1,"term":-1,"sender":"s","body":{"lost":[]}}',
            "term: -1 is not a count",
        ),
        (
            b'{"kind":"STOP","job":"j","generation":1,"term":1,"sender":"s","body":{"lost":["1"]}}',
            "STOP.lost: '1' is not a count",
        ),
        (
            b'{"kind":"STOP","job":"j","generation":1,"term":1,"sender":"s","body":{"lost":[],"x":1}}',
            "STOP: unknown field 'x'",
        ),
        (
            b'{"kind":"STOP","job":"j","generation":1,"term":1,"sender":"s","body":[]}',
            r"STOP: \[\] is not an object",
        ),
        (
            b'{"kind":"ACTIVE","job":"j","generation":1,"term":1,"sender":"s"}',
            "ACTIVE: term is missing",
        ),
        (
            b'{"kind":"BEAT","job":"j","generation":1,"term":1,"sender":"s","body":{"done":1,"ready":1,"phase":"x"}}',
            "'x' is none of computing",
        ),
    ],
)
def test_what_is_no_message_is_a_clear_error(data: bytes, error: str) -> None:
    with pytest.raises(MalformedError, match=error):
        decode(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from(sorted(KINDS)), st.data())
@settings(max_examples=150, deadline=None)
def test_any_fields_are_a_message_or_malformed(kind: str, data: st.DataObject) -> None:
    names = list(KINDS[kind].__dataclass_fields__)
    body = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(names, JSON)))
    text = json.dumps(
        {"kind": kind, "job": "j", "generation": 0, "term": 0, "sender": "s", "body": body}
    )
    try:
        found = decode(text.encode())
    except MalformedError:
        return
    assert decode(encode(found)) == found or "nan" in repr(found).lower()


@pytest.mark.parametrize(
    ("rank", "world", "holders", "name"),
    [
        (4, 4, (4,), "{step}"),
        (0, 4, (1, 2), "{step}"),
        (0, 4, (0, 4), "{step}"),
        (0, 4, (0, 0), "{step}"),
        (0, 4, (0,), "../{step}"),
    ],
)
def test_a_rank_that_makes_no_sense_is_malformed(
    rank: int, world: int, holders: tuple[int, ...], name: str
) -> None:
    body = {
        "rank": rank,
        "world": world,
        "node": "n",
        "pid": 1,
        "started": 1,
        "gate": "none",
        "holders": {"s": list(holders)},
        "name": name,
    }
    text = json.dumps(
        {"kind": "HELLO", "job": "j", "generation": 0, "term": 0, "sender": "s", "body": body}
    )
    with pytest.raises(MalformedError):
        decode(text.encode())


def test_names_of_checkpoints() -> None:
    assert [
        checkpoint_name(pattern, 42)
        for pattern in ("step-{step}", "iter_{step:07d}", "{step}.ckpt")
    ] == [
        "step-42",
        "iter_0000042",
        "42.ckpt",
    ]
    for wrong in (
        "step",
        "{step}/{step}",
        "a/{step}",
        "{step.real}",
        "{step:>9}",
        ".{step}",
        "{step}{step}",
    ):
        with pytest.raises(ValueError, match="names no checkpoint"):
            checkpoint_name(wrong, 1)
