"""When RAM is compared with the checksums: slowly, in the background, and at once when an operator
asks.

The background pass takes about as long as it is to take (`scrub_ram_s`), stands back while files
are written and the processors are busy, and begins anew with each worker. What it finds damaged
stays a warning of `status` until it is found right, or gone.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence

import trio

from acpfs.backing.calls import CallPool
from acpfs.drain_records import Verification
from acpfs.filesystem.scrub import Pace, RamScrub, ScrubFinding, ScrubPlace, Soundness
from acpfs.filesystem.steps import settled
from acpfs.logger import get_logger, shown
from acpfs.runtime.given import Runtime
from acpfs.writeback.streams.bandwidth import TokenBucket
from acpfs.writeback.streams.give_way import GiveWay

SCRUB_THREADS = 2
"""One for the background, one for operators: a backing directory that hangs keeps no others
waiting.
"""
RATE_MIN = 1 << 20
RATE_MAX = 256 << 20
"""Bytes per second: a pass ends some time, and none takes more than a twentieth of a processor."""
AGAIN_S = 60.0
"""What is damaged and may be repaired once it is closed is looked at so often."""
NAMED_MAX = 10

log = get_logger(__name__)


class Scrubbing:
    """Owns the threads and the warnings."""

    def __init__(
        self,
        scrub: RamScrub,
        every_s: float,
        give_way: GiveWay,
        now: Callable[[], float],
        given: Runtime,
    ) -> None:
        """`every_s`: about how long a pass takes; 0: there are none.

        `now`: the clock that `give_way` knows.
        """
        self._scrub = scrub
        self._every_s = every_s
        self._give_way = give_way
        self._now = now
        self._calls = CallPool("scrub", SCRUB_THREADS, given)
        self._bucket = TokenBucket(RATE_MIN, given)
        self._damaged: dict[ScrubPlace, ScrubFinding] = {}
        self._damaged_files = 0

    def close(self) -> None:
        """No more threads; those that are out see it at their next piece."""
        self._bucket.close()
        self._calls.close()

    async def run(self) -> None:
        """Pass after pass, until cancelled."""
        while self._every_s:
            began = trio.current_time()
            await self._pass()
            while (left_s := began + self._every_s - trio.current_time()) > 0:
                await trio.sleep(min(left_s, AGAIN_S))
                for place in list(self._damaged):
                    await self._look(place, [], self._slowly)

    async def _pass(self) -> None:
        places = self._places()
        wanted = 2 * sum(place.size for place in places) / self._every_s
        self._bucket.set_rate(int(min(max(wanted, RATE_MIN), RATE_MAX)))
        for place in places:
            await self._look(place, [], self._slowly)

    def _places(self) -> list[ScrubPlace]:
        """What is not there any more is no damage any more."""
        places = self._scrub.places()
        for gone in self._damaged.keys() - set(places):
            del self._damaged[gone]
        return places

    def _slowly(self, count: int) -> None:
        self._give_way.wait(self._now(), lambda: False)
        self._bucket.take(count)

    async def _look(
        self, place: ScrubPlace, paths: Sequence[bytes], pace: Pace
    ) -> ScrubFinding | None:
        looked = self._calls.submit("scrub", self._scrub.look, place, paths, pace)
        await settled(looked)
        finding = looked.result()
        if finding is not None and finding.why and place not in self._damaged:
            log.error(
                "RAM has other bytes of a file than were stored",
                path=shown(finding.path),
                why=finding.why,
                expected=finding.expected,
                found=finding.found,
            )
        if finding is not None and finding.soundness is Soundness.DAMAGED:
            self._damaged_files += place not in self._damaged
            self._damaged[place] = finding
        elif finding is not None or not paths:
            self._damaged.pop(place, None)
        return finding

    async def verify(
        self, paths: Sequence[bytes], tell: Callable[[Verification], Awaitable[None]]
    ) -> None:
        """Compare all, or what lies at and below paths, at full speed."""
        for place in self._places():
            finding = await self._look(place, paths, lambda _count: None)
            if finding is not None:
                await tell(_verdict(finding))

    def warnings(self) -> list[str]:
        """For `status`, while it lasts."""
        if not self._damaged:
            return []
        found = list(self._damaged.values())
        named = "; ".join(f"{shown(finding.path)}: {finding.why}" for finding in found[:NAMED_MAX])
        more = f"; and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
        return [f"RAM has other bytes of {len(found)} files than were stored ({named}{more})"]

    def counters(self) -> dict[str, int]:
        """For `status` and the metrics."""
        counted = {
            "ram_scrubbed_bytes": self._scrub.read_bytes,
            "ram_repaired_files": self._scrub.repaired_files,
        }
        return counted | {"ram_damaged_files": self._damaged_files}


def _verdict(finding: ScrubFinding) -> Verification:
    path = os.fsdecode(finding.path)
    expected = finding.expected or None
    found = finding.found or None
    return Verification(
        path, finding.soundness.value, finding.size, expected, found, finding.why or None
    )
