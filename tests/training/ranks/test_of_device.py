"""Tensors of a device on their way to another rank, by doubles: nothing of this was run on a
device.
"""

from __future__ import annotations

import io
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from acpfs.training.frameworks.deepspeed import DeepSpeedHolding
from acpfs.training.host_state import Taken
from acpfs.training.torch.buddy import packed, unpacked
from acpfs.training.torch.transfer import Piece, fill, filled, flat, outline


class Away(torch.Tensor):  # type: ignore[misc]  # torch is not there where types are checked
    """Of a device that this rank has not got: whoever reads it has to fetch it first."""

    @property
    def device(self) -> Any:
        return torch.device("cuda", 3)

    def cpu(self) -> Any:
        return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("it would be looked for on that very device")


@pytest.mark.clause("T206")
def test_what_was_in_a_devices_memory_comes_to_where_its_parameter_is() -> None:
    """And what was in the host's stays there, as an optimizer's count of steps."""
    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))
    optimizer = torch.optim.Adam([parameter])
    contents = {
        "w": {
            "": Piece(torch.ones(3).as_subclass(Away)),
            "exp_avg": Piece(torch.ones(3).as_subclass(Away)),
            "step": Piece(torch.tensor(4.0)),
            "kind": Piece("a word"),
        }
    }
    written = io.BytesIO()
    pickle.dump(outline(contents), written)
    sent = iter([one.cpu() for one in flat(contents)])
    found = filled(pickle.loads(written.getbuffer()), lambda room: room.copy_(next(sent)))
    fill({"w": parameter}, [optimizer], found)
    state = optimizer.state[parameter]
    assert (state["exp_avg"].device.type, state["step"].device.type) == ("meta", "cpu")
    assert (state["step"].item(), state["kind"]) == (4.0, "a word")


@pytest.mark.clause("T206")
def test_moments_of_a_part_of_deepspeeds_come_to_where_that_is() -> None:
    """A lost rank's, from another one's memory."""
    part = torch.nn.Parameter(torch.empty(3, device="meta"))
    held = DeepSpeedHolding.__new__(DeepSpeedHolding)
    optimizer = torch.optim.Adam([part])
    vars(held).update(_part=part, _zero=SimpleNamespace(optimizer=optimizer))
    sent = {
        "": Piece(torch.ones(3), of_device=True),
        "exp_avg": Piece(torch.ones(3), of_device=True),
        "step": Piece(torch.tensor(4.0)),
    }
    held.fill({"part": sent})
    state = optimizer.state[part]
    assert (state["exp_avg"].device.type, state["step"].device.type) == ("meta", "cpu")


@pytest.mark.clause("T206")
def test_host_state_goes_through_the_hosts_memory() -> None:
    away = torch.arange(3.0).as_subclass(Away)
    found = unpacked(packed(Taken({"buffers": {"mean": away}, "python": [1, 2]}, follows=False)))
    mean = found.values["buffers"]["mean"]
    assert (type(mean), mean.tolist()) == (torch.Tensor, [0, 1, 2])
    assert found.values["python"] == [1, 2]
