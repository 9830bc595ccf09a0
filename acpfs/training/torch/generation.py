"""The process groups of one generation of a job whose ranks are replaced: whose collectives a
device does, how they end, and when its memory can be read behind that.

A function that runs again makes its groups itself, so what they are is known when it has made them:
a fault may come before. `abort` and `is_behind` may be called from any thread, at any time; the
rest belongs to the main thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from acpfs.errors import ConfigError
from acpfs.training.marks import Marks
from acpfs.training.policy import Policy
from acpfs.training.torch.aborts import Aborts
from acpfs.training.torch.bucket_order import order_over
from acpfs.training.torch.device import BACKENDS, Device, Processor
from acpfs.training.torch.groups import (
    device_of_groups,
    groups_have_failed,
    groups_of_device,
)
from acpfs.training.torch.progress import LostError, Progress
from acpfs.training.torch.sockets import GroupSockets

_LEFT: list[Any] = []
"""Groups that were left: the end of such an object would wait for collectives that may never
end.
"""


class Generation:
    """Of one rank."""

    def __init__(self, marks: Marks, policy: Policy) -> None:
        self._marks = marks
        self._policy = policy
        self._sockets = GroupSockets()
        self._device: Device = Processor()
        self._devices: dict[str, Device] = {}
        """By backend, as the main thread's device is: of another thread it is the first one."""
        self._aborts: Aborts | None = None
        self._making = threading.Lock()
        self.progress = Progress(self._device, marks)
        self.control: Any = None
        """gloo's, of all ranks: what acpfs says itself goes over it, whatever the job's own are."""

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Whatever is opened in it counts as a group's connection."""
        with self._sockets.noting():
            yield

    def meeting(self) -> None:
        """The script begins to make its groups."""
        for name, make in BACKENDS.items():
            with suppress(ConfigError):  # there is no such device
                self._devices[name] = make()

    def make_control(self) -> Any:
        """A collective, when the default group is there.

        Raises:
            ConfigError: a backend that nobody can be got out of, or that no device has seen.
        """
        self._device = device_of_groups(self._policy.untried_device)
        if self._device.is_behind:
            self.progress = Progress(
                *(self._device, self._marks, groups_have_failed, self._policy.update_s)
            )
        self.control = dist.new_group(backend="gloo")
        return self.control

    def order_buckets(self, model: Any) -> None:
        """What DDP tells its ranks of its buckets goes over gloo."""
        if self._device.is_behind:
            order_over(self.control, model)

    def gathered(self, value: Any) -> list[Any]:
        """Everybody's, by rank; a collective."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value, group=self.control)
        return found

    @property
    def is_behind(self) -> bool:
        """Whether a device does collectives behind the host's back."""
        return bool(groups_of_device())

    def abort(self) -> int:
        """End all collectives; how many groups and connections that were."""
        begun = 0
        if self.is_behind:
            # first, and each in a thread of its own, so that none holds up another
            begun = self._aborting().begin()
        return begun + self._sockets.shut_down()

    def _aborting(self) -> Aborts:
        with self._making:
            if self._aborts is None:
                device = self._device
                if not device.is_behind:  # a fault before `make_control`
                    names = {
                        str(part).rpartition(":")[2]
                        for config in dict(dist.distributed_c10d._world.pg_backend_config).values()  # noqa: SLF001
                        for part in str(config).split(",")
                    } & BACKENDS.keys()
                    name = min(names)
                    device = self._devices.get(name) or BACKENDS[name]()
                self._aborts = Aborts(
                    *(device, groups_of_device, self._may_end_everything),
                    self._policy.update_s,
                )
            return self._aborts

    def _may_end_everything(self) -> bool:
        return not self._marks.updating and self.progress.has_updated()

    def settle(self, probed: Callable[[], Any]) -> None:
        """All collectives have ended, the update that was launched is done, and tensors can be
        read.

        `probed`: one of them.

        Raises:
            LostError: they cannot: nothing works on the device any more in this process.
        """
        if not self.is_behind:
            return
        aborts = self._aborting()
        aborts.begin()  # also where no fault was: all that was made goes
        if not aborts.over(self._policy.abort_s):
            raise LostError(f"an abort has not come back in {self._policy.abort_s:g} s")
        device = aborts.device
        device.enter_thread()
        progress = (
            self.progress if self.progress.device.is_behind else Progress(device, self._marks)
        )
        progress.settle(probed, self._policy.probe_s)

    def leave(self) -> None:
        """Out of all process groups, whatever state they are in."""
        if not dist.is_available():
            return
        if not dist.is_initialized():
            # the making of one was broken off: torch goes on counting, and names would differ
            # between ranks
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        # torch offers no list of groups
        _LEFT.extend(dist.distributed_c10d._world.pg_map)  # noqa: SLF001
        if self.is_behind:
            # forgets them; the end of an accelerator's group would wait for its device
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001
        else:
            dist.destroy_process_group()


def any_tensor() -> Any:
    """Where this rank has none of its own yet."""
    return torch.zeros(1)
