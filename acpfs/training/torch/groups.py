"""Process groups of a protected rank: making some, ending all, and the group of those who save.

What acpfs says itself goes over gloo, whatever the job's own groups are: those may be an
accelerator's, whose collectives are ended by aborts. Out of gloo's a rank comes by its sockets.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from acpfs.errors import ConfigError
from acpfs.training.torch.bucket_order import order_over
from acpfs.training.torch.device import BACKENDS, Device, Processor
from acpfs.training.torch.sockets import GroupSockets, connections

SAVERS_TIMEOUT_S = 86_400.0
"""None, in effect: one saver's storage may stand still, and the coordinator knows who is waited
for, and ends the group's connections.
"""


NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Else torch's own watchdog ends the process when it sees an abort, or a long save."""
_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


def _backends(config: object) -> set[str]:
    """Of torch's "cpu:gloo,cuda:nccl"."""
    return {part.rpartition(":")[2] for part in str(config).split(",")}


def device_of_groups(untried: bool) -> Device:
    """Whose collectives the default group does.

    `untried`: whether the user wants what was run with doubles only.

    Raises:
        ConfigError: a backend that nobody can be got out of; or one that no device has seen.
    """
    # As torch has resolved it: "cpu:gloo" also where init_process_group was given none.
    backend = dist.get_backend_config()
    found = _backends(backend) - {"gloo"}
    if not found:
        return Processor()
    if len(found) > 1 or not found <= BACKENDS.keys():
        raise ConfigError(
            f"backend {backend}: acpfs.training gets ranks out of the collectives of gloo, or of "
            f"gloo and one of {', '.join(sorted(BACKENDS))}"
        )
    (name,) = found
    if name == "nccl":
        _refuse_watchdog()
    if name in UNTRIED and not untried:
        raise ConfigError(
            f"backend {backend}: acpfs.training was not run on a device; untried_device = on "
            "(ACPFS_TRAIN_UNTRIED_DEVICE=1) has it all the same, docs/TRAINING.md says what was "
            "tried"
        )
    return BACKENDS[name]()


UNTRIED = {"nccl", "hccl"}
"""Run with doubles only, by the rule of this project: until a run on a device is recorded."""


def _refuse_watchdog() -> None:
    wrong = {name for name, value in NCCL_SETTINGS.items() if os.environ.get(name) != value}
    if wrong:
        raise ConfigError(
            "NCCL would end this process at a fault: export "
            + " ".join(f"{name}={value}" for name, value in NCCL_SETTINGS.items())
            + " before init_process_group"
        )
    for name in _BLOCKING:
        if os.environ.get(name, "0") not in ("0", ""):
            raise ConfigError(f"{name}: each wait would keep the main thread in C; unset it")


def groups_of_device() -> dict[Any, Any]:
    """Groups that there are, and whose collectives are not gloo's → torch's device of these; from
    any thread.
    """
    # torch offers no list of groups
    configs = dict(dist.distributed_c10d._world.pg_backend_config)  # noqa: SLF001
    found = {}
    for group, config in configs.items():
        for part in str(config).split(","):
            kind, _, backend = part.rpartition(":")
            if backend in BACKENDS:
                found[group] = torch.device(kind or "cpu")
    return found


def groups_have_failed() -> bool:
    """Whether one of these says so, where its backend can."""
    for group, kind in groups_of_device().items():
        try:
            error = group._get_backend(kind).get_error()  # noqa: SLF001  # no public name
        except (RuntimeError, AttributeError, NotImplementedError):  # it cannot
            continue
        if getattr(error, "name", "SUCCESS") != "SUCCESS":
            return True
    return False


def _nothing() -> None:
    """Nothing to take back."""


class Groups:
    """Of one rank.

    `abort` may be called from any thread; the rest belongs to the main thread, of all ranks alike.
    """

    def __init__(self, *, untried: bool = False) -> None:
        """Begin; a collective where the job's groups are an accelerator's.

        `untried`: as for `device_of_groups`.

        Raises:
            ConfigError: a backend whose collectives nobody can be got out of.
        """
        if not dist.is_initialized():
            raise ConfigError("protect comes after torch.distributed.init_process_group")
        self.device = device_of_groups(untried)
        self._sockets = GroupSockets()
        self._control = self.make() if self.device.is_behind else None
        """What acpfs says itself goes over it; None: the default group is gloo's."""
        self._left: list[Any] = []
        """Groups that were destroyed: the end of such an object would wait for collectives that may
        never end.
        """

    def learn(self) -> None:
        """Know the connections of all groups that there are; a collective."""
        mine = connections()
        self._sockets.note_shared(
            mine, [ends for theirs in self.gathered(list(mine.values())) for ends in theirs]
        )

    def gathered(self, value: Any) -> list[Any]:
        """Everybody's value, by rank; a collective."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value, group=self._control)
        return found

    def of_device(self) -> dict[Any, Any]:
        """Groups whose collectives the accelerator does → torch's device of these."""
        return groups_of_device() if self.device.is_behind else {}

    def order_buckets(self, model: Any) -> Callable[[], None]:
        """What DDP tells its ranks of its buckets goes over gloo; what this gives takes it back."""
        return order_over(self._control, model) if self.device.is_behind else _nothing

    def have_failed(self) -> bool:
        """Whether a group of the accelerator says so, where its backend can."""
        return self.device.is_behind and groups_have_failed()

    def make(self, timeout_s: float | None = None) -> Any:
        """A group of all ranks. `timeout_s`: of its collectives; None: torch's own."""
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        with self._sockets.noting():
            return dist.new_group(backend="gloo", timeout=timeout)

    def watched(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """`make` with its connections noted: for whoever makes groups while a protection is on."""

        def make_and_note(*args: Any, **kwargs: Any) -> Any:
            with self._sockets.noting():
                return make(*args, **kwargs)

        return make_and_note

    def clues(self) -> dict[str, int]:
        """For each group the number of the last collective that this rank began; from any
        thread.
        """
        found = {}
        # torch offers no list of groups
        for group in list(dist.distributed_c10d._world.pg_map):  # noqa: SLF001
            try:
                # nor their numbers
                found[str(group.group_name)] = int(group._get_sequence_number_for_group())  # noqa: SLF001
            except RuntimeError:  # a backend that does not count
                continue
        return found

    def abort(self) -> int:
        """End all of gloo's collectives; who waits in one gets an error.

        The number of connections that were ended.
        """
        return self._sockets.shut_down()

    def regroup(self, store: Any, rank: int, world: int) -> None:
        """Leave all groups, and be `rank` of a new default group of `world`."""
        if not dist.is_initialized():
            # The making of a group was broken off: torch goes on counting, and its names would
            # differ between ranks.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        # torch offers no list of groups
        self._left.extend(dist.distributed_c10d._world.pg_map)  # noqa: SLF001
        if self.device.is_behind:
            # forgets them; the end of an accelerator's group would wait for its device
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001
        else:
            dist.destroy_process_group()
        with self._sockets.noting():
            dist.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=SAVERS_TIMEOUT_S),
            )
