"""Large files, written in place and beside: what the application does, the stands it is done on,
and what was being written at a kill.

On these stands an observer looks at the backing directory all the time (`watch`): what is published
too early may be whole again when everything has been drained.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.drill.faults import let_work
from tests.drill.guarded import GuardStand
from tests.drill.spec import JournalReader
from tests.drill.stand import Stand
from tests.drill.under_way import UnderWay
from tests.drill.watch import Watch

WRITING_WAIT_S = 3.0
AGE_S = 1.0
"""Of what is committed by age (S12): none of these files may be, and a change of workers must not
change that.
"""


class LargeStand(Stand):
    """The backing directory is watched as long as the stand is there."""

    worker_deaths_max = 8
    writes_logs = False

    def __init__(
        self, base: Path, workload: str, transport: str, seed: int, **options: Any
    ) -> None:
        super().__init__(base, workload, transport, seed, **{"max_dirty_age": AGE_S, **options})
        self.watch = Watch(self.shown)

    def __enter__(self) -> Stand:
        self.watch.start()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self.watch.stop()
        super().__exit__(*error)

    def wait_for_work(self) -> None:
        """Until a file is half-written, or nobody writes any more."""
        assert self.application is not None
        until_s = time.monotonic() + WRITING_WAIT_S
        while time.monotonic() < until_s:
            writing = UnderWay()
            writing.follow(JournalReader(self.application.journal).calls())
            if writing.is_on:
                return
            let_work(0.01)

    def begin(self) -> None:
        super().begin()
        self.watch.take()

    def check_undecided(self) -> list[str]:
        """The older versions are there, or nothing (S180, S181), once all else is."""
        self.mount.flush(timeout_s=self.drain_s)
        if self.history.unsure is None:
            self.history.promised.append((time.monotonic(), len(self.history.states) - 1))
        return self.check_backing("before a half is decided about") + self.check_watched()

    def check_watched(self) -> list[str]:
        """What was seen on the backing directory since the last time."""
        return self.watch.judge(self.history)

    def left_over(self, status: dict[str, Any]) -> list[str]:
        """What a file that grew may be appended to stays for two minutes (S233)."""
        return [left for left in super().left_over(status) if "/spare-" not in left]

    def check_drained(self) -> list[str]:
        """All that was seen until then, too."""
        return super().check_drained() + self.check_watched()


class LargeGuardStand(LargeStand, GuardStand):
    """With the guard on."""

    def check_watched(self) -> list[str]:
        """A checkpoint that was deleted may lie there for longer; what is seen of it is what it
        once was.
        """
        self._remember(self.history)
        return self.watch.judge(self.history, self.was)

    def was(self, path: str, entry: tuple[str, str] | None) -> bool:
        """Whether a checkpoint ever had that, or was not there."""
        top, _slash, below = path.partition("/")
        return top in self._versions and (
            entry is None or any(form.get(below) == entry for form in self._versions[top])
        )
