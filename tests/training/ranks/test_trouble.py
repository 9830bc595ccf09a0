"""Whose error it is: what gloo, torch's stores and the job's own store raise is a consequence; what
a program says by itself is not.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from acpfs.training.member import GenerationOverError
from acpfs.training.memory_left import GoneError
from acpfs.training.messages import TroubleKind
from acpfs.training.torch.rank import trouble_kind
from acpfs.training.torch.sockets import GroupSockets
from acpfs.training.torch.store import LinkStore
from tests.training.ranks.forked import Ranks

pytestmark = pytest.mark.clause("T154", "T162")
WORLD = 2
WAITS = 0
DIES = 1


def wrapped(error: BaseException, *, says_why: bool = True) -> BaseException:
    """As a loop does."""
    try:
        try:
            raise error
        except BaseException as caught:
            if says_why:
                raise ValueError("the step failed") from caught
            raise ValueError("the step failed") from None
    except ValueError as found:
        return found


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("connection lost to the database"),
        RuntimeError("Connection refused"),
        RuntimeError("Timed out waiting for the tokenizer"),
        RuntimeError("no process group in this configuration file"),
        RuntimeError("gloo is not the backend that I want"),
        RuntimeError("[config.py:12] igloo/settings: no such key"),
        RuntimeError("Operation of the queue: Operation timed out!"),
        ConnectionResetError("of a data loader"),
        ConnectionError("of a metric's server"),
        TimeoutError("of a lock"),
        NotImplementedError("[x/gloo/y.cc:1]"),
        ValueError("Default process group has not been initialized"),
        wrapped(dist.DistBackendError("a collective"), says_why=False),
    ],
    ids=repr,
)
def test_a_programs_own_error_is_its_own(error: BaseException) -> None:
    assert trouble_kind(error) is TroubleKind.ERROR


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer "
            "[127.0.0.1]:1"
        ),
        RuntimeError(
            "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:446] "
            "op.preamble.length <= op.nbytes. 8 vs 4"
        ),
        dist.DistNetworkError("The client socket has timed out"),
        GenerationOverError("over"),
        GoneError("who kept it has ended"),
        wrapped(dist.DistBackendError("a collective")),
    ],
    ids=repr,
)
def test_that_of_somebody_who_is_gone_is_a_consequence(error: BaseException) -> None:
    assert trouble_kind(error) is TroubleKind.COLLECTIVE


def kind_of(call: Callable[[], object]) -> str:
    """Of what this raises, with its text."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  # of any kind: that is the question
        return f"{trouble_kind(error).name}: {type(error).__name__}: {error}"
    return "nothing was raised"


def store_is_over(*_: Any) -> Any:
    raise GenerationOverError("this generation's store has ended")


CALLS: dict[str, Callable[[Any], object]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(1), group=group),
    "broadcast": lambda group: dist.broadcast(torch.ones(1), DIES, group=group),
    "all_gather_object": lambda group: dist.all_gather_object([None] * WORLD, 1, group=group),
    "recv": lambda group: dist.recv(torch.ones(1), DIES, group=group),
    "barrier": lambda group: dist.barrier(group=group),
    "monitored_barrier": lambda group: dist.monitored_barrier(
        group=group, timeout=timedelta(seconds=5)
    ),
}


@pytest.mark.parametrize(
    "ended", ["by the peer", "here", pytest.param("by the clock", marks=pytest.mark.long)]
)
def test_what_this_torch_raises(tmp_path: Path, ended: str) -> None:
    """For each call, when the other rank dies in it, when its connections are shut down, and when
    nobody comes.
    """

    def main(rank: int) -> None:
        store = dist.FileStore(str(tmp_path / "store"), WORLD)
        sockets = GroupSockets()
        with sockets.noting():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
            clock = {"timeout": timedelta(seconds=10)} if ended == "by the clock" else {}
            groups = {name: dist.new_group(**clock) for name in CALLS}
        if rank == DIES:
            store.set("here", "1")
            store.wait(["told"], timedelta(seconds=600))
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait(["here"], timedelta(seconds=600))
        if ended != "by the clock":
            store.set("told", "1")
        if ended == "here":
            sockets.shut_down()
        said = {name: kind_of(partial(call, groups[name])) for name, call in CALLS.items()}
        over = LinkStore(store_is_over)  # what torch has of it ends with it
        said["a store in Python"] = kind_of(lambda: dist.PrefixStore("p", over).get("key"))
        said["a group over it"] = kind_of(
            lambda: dist.ProcessGroupGloo(over, 0, 2, timedelta(seconds=600))
        )
        store.set("told", "1")
        print(said)
        wrong = {name: text for name, text in said.items() if not text.startswith("COLLECTIVE")}
        assert not wrong, wrong

    with Ranks(WORLD, tmp_path, main) as ranks:
        assert ranks.status(WAITS) == 0, ranks.said()
