"""Every opcode is either handled or left to the kernel on purpose."""

from __future__ import annotations

from typing import Any

import pytest

from acpfs.transport.native import dispatch
from acpfs.transport.native.protocol import Opcode

LEFT_TO_THE_KERNEL = {
    Opcode.GETLK: "locks are the kernel's own: no lock flags are asked for",
    Opcode.SETLK: "as above",
    Opcode.SETLKW: "as above",
    Opcode.BMAP: "no block device below",
    Opcode.IOCTL: "ENOTTY, exception X4",
    Opcode.POLL: "regular files are always ready",
    Opcode.SETUPMAPPING: "DAX, of virtio only",
    Opcode.REMOVEMAPPING: "DAX, of virtio only",
    Opcode.INIT: "before the session is served: session.negotiate",
}


class PartDouble:
    """Stands for the parts that the tables name functions of; none is called."""

    def __getattr__(self, name: str) -> Any:
        return PartDouble()

    def __call__(self, *_arguments: Any) -> Any:
        return PartDouble()


def test_every_opcode_is_handled_or_left_out_for_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "ResentRequests", PartDouble())
    part: Any = PartDouble()
    made = dispatch.Dispatch(part, part, part, part, part)
    handled = set(made._operations) | set(made._without_call)
    assert handled == set(Opcode) - set(LEFT_TO_THE_KERNEL)
