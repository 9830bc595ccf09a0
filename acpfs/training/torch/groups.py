"""Process groups of a protected rank: making some, ending all, and the group of those who save.
gloo only, until another was tried.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from acpfs.errors import ConfigError
from acpfs.training.torch.sockets import GroupSockets, connections

SAVERS_TIMEOUT_S = 86_400.0
"""None, in effect: one saver's storage may stand still, and the coordinator knows who is waited
for, and ends the group's connections.
"""


def refuse_other_backends() -> None:
    """Of the default group, which has to be there.

    Raises:
        ConfigError: a backend whose collectives nobody has tried to leave.
    """
    # As torch has resolved it: "cpu:gloo" also where init_process_group was given none.
    backend = str(dist.get_backend_config())
    if {part.rpartition(":")[2] for part in backend.split(",")} != {"gloo"}:
        raise ConfigError(
            f"backend {backend}: acpfs.training gets ranks out of gloo's collectives only; "
            "others were not tried on a device"
        )


class Groups:
    """Of one rank.

    `abort` may be called from any thread; the rest belongs to the main thread, of all ranks alike.
    """

    def __init__(self) -> None:
        """Begin.

        Raises:
            ConfigError: a backend whose collectives nobody has tried to leave.
        """
        if not dist.is_initialized():
            raise ConfigError("protect comes after torch.distributed.init_process_group")
        refuse_other_backends()
        self._sockets = GroupSockets()
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
        dist.all_gather_object(found, value)
        return found

    def make(self) -> Any:
        """A group of all ranks."""
        with self._sockets.noting():
            return dist.new_group(backend="gloo")

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
        """End all collectives; who waits in one gets an error.

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
        dist.destroy_process_group()
        with self._sockets.noting():
            dist.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=SAVERS_TIMEOUT_S),
            )
