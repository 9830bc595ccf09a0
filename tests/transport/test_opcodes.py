"""Every opcode is either handled or left to the kernel on purpose, and has one module of the
transport.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyfuse3
import pytest

from acpfs.transport import libfuse
from acpfs.transport.native import dispatch
from acpfs.transport.native.protocol import Opcode

LEFT_TO_THE_KERNEL = {
    Opcode.BMAP: "no block device below",
    Opcode.IOCTL: "ENOTTY, exception X4",
    Opcode.POLL: "regular files are always ready",
    Opcode.SETUPMAPPING: "DAX, of virtio only",
    Opcode.REMOVEMAPPING: "DAX, of virtio only",
    Opcode.INIT: "before the session is served: session.negotiate",
}

NAMED_ELSEWHERE = {
    "dispatch.py": {
        *(
            "ACCESS",
            "BATCH_FORGET",
            "DESTROY",
            "FORGET",
            "GETLK",
            "INTERRUPT",
            "NOTIFY_REPLY",
            "SETLK",
            "SETLKW",
            "SYNCFS",
        ),  # answered without a call
        "WRITE",  # may keep its buffers
    },
    "negotiate.py": {"INIT"},
    "reader.py": {"READ"},  # gives the turn away
    "replies.py": {
        *("GETXATTR", "OPEN", "READDIRPLUS"),  # share their forms with LISTXATTR, CREATE, READDIR
        "STATX",  # says how long it is valid, which the session knows
    },
    "request.py": {"WRITE"},  # has a payload
    "resent_requests.py": {
        "LINK",
        "MKDIR",
        "MKNOD",
        "SYMLINK",
        "RENAME",
        "RENAME2",
        "RMDIR",
        "UNLINK",
        "REMOVEXATTR",
        "SETXATTR",
    },
    "session.py": {"INIT"},
}
"""Opcodes that a module beside `operations` and the list of `protocol` knows, each for a reason
that most have not.
"""
LEFT_OF_PYFUSE3 = {
    "init": "a hook: nothing to begin",
    "poll": "regular files are always ready",
    "stacktrace": "a hook: the log has stacks",
}


class PartDouble:
    """Stands for the parts that the tables name functions of; none is called."""

    def __getattr__(self, name: str) -> Any:
        return PartDouble()

    def __call__(self, *_arguments: Any) -> Any:
        return PartDouble()


class KeptDouble(PartDouble):
    """Of a session in which no request has hung a worker, or was given up."""

    given_up: tuple[int, ...] = ()
    hung: tuple[tuple[int, tuple[int, int]], ...] = ()


def test_every_opcode_is_handled_or_left_out_for_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "ResentRequests", PartDouble())
    part: Any = PartDouble()
    kept: Any = KeptDouble()
    made = dispatch.Dispatch(part, kept, part, part, part)
    handled = set(made._operations) | set(made._without_call)
    assert handled == set(Opcode) - set(LEFT_TO_THE_KERNEL)


def test_an_opcode_is_at_home_in_one_module() -> None:
    """A new one is a change of `operations`, of the facade, and of the module that owns its
    meaning.
    """
    names = {opcode.name for opcode in Opcode}
    found: dict[str, set[str]] = {}
    for path in sorted(Path(dispatch.__file__).parent.glob("*.py")):
        named = re.findall(
            r"\bOpcode\.([A-Z0-9_]+)|\b([A-Z0-9_]+)_(?:IN|OUT)\b", path.read_text(encoding="utf-8")
        )
        found[path.name] = {one or other for one, other in named} & names
    del found["operations.py"], found["protocol.py"]
    assert {name: opcodes for name, opcodes in found.items() if opcodes} == NAMED_ELSEWHERE


def test_libfuse_has_all_that_pyfuse3_offers() -> None:
    offered = {
        name
        for name, one in vars(pyfuse3.Operations).items()
        if callable(one) and not name.startswith("_")
    }
    assert offered - set(vars(libfuse.Operations)) == set(LEFT_OF_PYFUSE3)
