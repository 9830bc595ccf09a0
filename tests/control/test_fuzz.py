"""Hostile requests: whatever comes over the socket, each is answered or hung up on, and the next
one is served.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from acpfs.control.socket_messages import BadRequestError, ControlRequest, decode_request
from acpfs.control.verbs import HANDLERS
from acpfs.errors import AcpfsError
from tests.control.double import DoubleSubject
from tests.control.test_server import ask, raw, serve

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["paths", "timeout_s", "verified", "leave", "key", "value", "reason", "x"]),
    JSON,
    max_size=5,
)
ENDLESS = ("unmount",)
"""Verbs that may rightly wait for ever on a double that never ends."""


@given(st.binary(max_size=200))
def test_any_line_is_a_request_or_refused(line: bytes) -> None:
    with contextlib.suppress(BadRequestError):
        assert isinstance(decode_request(line), ControlRequest)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(set(HANDLERS) - set(ENDLESS))), ARGUMENTS)
def test_any_arguments_are_answered_or_refused_in_words(
    verb: str, arguments: dict[str, Any]
) -> None:
    async def tell(_event: dict[str, Any]) -> None:
        return

    async def main() -> None:
        with trio.move_on_after(1):
            with contextlib.suppress(AcpfsError):  # anything else is a bug
                await HANDLERS[verb](DoubleSubject(), ControlRequest(verb, arguments), tell)

    trio.run(main)


@pytest.mark.parametrize(
    "data",
    [
        b"\n",
        b"\0" * 1000 + b"\n",
        b'{"verb": "status"',
        b"[" * 100_000 + b"\n",
        b'{"verb":"status","args":' + b"9" * 5000 + b"}\n",
        b"x" * (1 << 21),
    ],
    ids=["empty", "zeros", "partial", "nested", "number", "huge"],
)
def test_the_server_lives_on_after(tmp_path: Path, data: bytes) -> None:
    async def scenario(_subject: DoubleSubject, record: Any) -> None:
        try:
            answers = await raw(record, data)
        except (trio.BrokenResourceError, ConnectionError):
            answers = []
        assert all("error" in answer for answer in answers)
        assert (await ask(record, "status"))["mount"] == "/mnt/x"

    serve(tmp_path, scenario)
