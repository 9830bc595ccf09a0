"""What a framework has registered, called as the product calls it: with its arguments, and a word
on how it went.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from acpfs.compatible.product_values import STOPPING_FIRST, RepairType
from acpfs.logger import get_logger

log = get_logger("acpfs.compatible")
CLEANED = 0
CLEAN_FAILED = 1
CLEANED_WITHOUT_REBUILD = 2
STOP_FIRST_VARIABLE = "TTP_STOP_CLEAN_BEFORE_DUMP"


class Event(Enum):
    """What a handler is for: the word in `tft_register_…_handler`."""

    SAVE = "save_ckpt"
    RENAME = "rename"
    EXIT = "exit"
    STOP = "stop"
    CLEAN = "clean"
    REPAIR = "repair"
    ROLLBACK = "rollback"
    REBUILD_GROUP = "rebuild_group"
    STREAM_SYNC = "stream_sync"
    ZIT_UPGRADE_ROLLBACK = "zit_upgrade_rollback"
    ZIT_UPGRADE_REPAIR = "zit_upgrade_repair"
    ZIT_UPGRADE_REBUILD = "zit_upgrade_rebuild"
    ZIT_DOWNGRADE_REBUILD = "zit_downgrade_rebuild"


GOING_ON = frozenset({Event.REBUILD_GROUP, Event.REPAIR, Event.ROLLBACK})
"""Called with `enable_arf` only."""
NEVER_CALLED = (
    frozenset(Event) - {Event.SAVE, Event.RENAME, Event.EXIT, Event.STOP, Event.CLEAN} - GOING_ON
)
"""They belong to what acpfs does not do in this interface."""
REBUILDING = frozenset({RepairType.RT_UCE_HIGHLEVEL, RepairType.RT_LOAD_REBUILD})
"""Model and optimizer have to be built anew before they are written."""


@dataclass
class Handlers:
    """Of one rank.

    Registered by the main thread before anything can happen, called by the processor's threads.
    """

    for_mindspore: bool
    args: Any = None
    """What `tft_set_step_args`, or the decorated function's call, has given."""
    framework: str | None = None
    """As `set_mindio_export_version` has it."""
    goes_on: bool = False
    """Whether ranks are replaced and the job goes on."""
    cleaned_without_rebuild: bool = False
    """What the clean handler said last."""
    _registered: dict[Event, tuple[Callable[..., Any], Any]] = field(default_factory=dict)

    def register(self, event: Event, function: Callable[..., Any], ctx: Any) -> None:
        """Take it, in place of an earlier one.

        Raises:
            TypeError: it cannot be called.
        """
        if not callable(function):
            raise TypeError("func must be a callable")
        if event in NEVER_CALLED or (event in GOING_ON and not self.goes_on):
            log.info(
                "registered, and never called: acpfs leaves a checkpoint and ends the job",
                handler=event.value,
            )
        self._registered[event] = (function, ctx)

    def has(self, event: Event) -> bool:
        """Whether there is one."""
        return event in self._registered

    @property
    def stops_first(self) -> bool:
        """Whether stop and clean come before a save, or before the job goes on."""
        return (
            self.goes_on
            or self.framework in STOPPING_FIRST
            or os.environ.get(STOP_FIRST_VARIABLE) == "1"
        )

    def stop(self) -> bool:
        """Whether the device was stopped, or nothing has to be."""
        return self._went_well(Event.STOP, lambda ctx: (self.args, ctx))

    def clean(self, is_uce_error: bool) -> bool:
        """Whether what was left on the device is gone."""
        if not self.has(Event.CLEAN):
            return True
        function, ctx = self._registered[Event.CLEAN]
        try:
            code = function(is_uce_error, self.args, ctx)
        except BaseException:  # torch's CheckpointException is no Exception
            log.exception("the clean handler failed")
            return False
        if code not in (CLEANED, CLEANED_WITHOUT_REBUILD):
            log.error("the clean handler failed", code=code)
        self.cleaned_without_rebuild = code == CLEANED_WITHOUT_REBUILD
        return code in (CLEANED, CLEANED_WITHOUT_REBUILD)

    def rebuild_group(self, fault_ranks: list[int]) -> bool:
        """Whether groups are whole again, with the processes that took these ranks' places."""
        return self._went_well(Event.REBUILD_GROUP, lambda ctx: (fault_ranks, self.args, ctx))

    def repair(self, step: int, kind: RepairType, info: dict[str, Any]) -> bool:
        """Whether this rank has sent, or got, what `info` says."""
        if not self.has(Event.REPAIR):
            log.error("nothing can be repaired: no repair handler is registered")
            return False
        return self._went_well(
            Event.REPAIR,
            lambda ctx: (step, kind in REBUILDING, list(info["dst"]), info, self.args, ctx),
        )

    def rollback(self, step: int) -> bool:
        """Whether data and the like are where they were at the end of this step."""
        return self._went_well(Event.ROLLBACK, lambda ctx: (step, self.args, ctx))

    def save(self, step: int, info: Sequence[dict[str, Any]]) -> bool:
        """Whether the framework has written its checkpoint."""
        if not self.has(Event.SAVE):
            log.error("nothing can be saved: no save_ckpt handler is registered")
            return False
        return self._went_well(Event.SAVE, lambda ctx: (step, list(info), self.args, ctx))

    def rename(self, step: int) -> bool:
        """Whether the checkpoint has its name."""
        return self._went_well(
            Event.RENAME, lambda ctx: (step, ctx if self.for_mindspore else self.args)
        )

    def exit(self) -> bool:
        """Whether there is one; as a rule it does not come back."""
        return self.has(Event.EXIT) and self._went_well(Event.EXIT, lambda ctx: (ctx,))

    def _went_well(self, event: Event, arguments: Callable[[Any], tuple[Any, ...]]) -> bool:
        if not self.has(event):
            return True
        function, ctx = self._registered[event]
        try:
            function(*arguments(ctx))
        except BaseException:  # torch's CheckpointException is no Exception
            log.exception("a handler failed", handler=event.value)
            return False
        return True
