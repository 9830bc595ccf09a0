"""Several nodes over one backing directory: one mount each, with a node id, a RAM tier and
processes of its own.

`Stand(tmp, backings)` takes one path per node: the same directory for all, or one client mount per
node of a distributed file system. What differs between nodes (clock, speed) is in the environment
of each. Knows nothing of what is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from acpfs.ram.node_clock import OFFSET_VARIABLE
from tests.rig.mounts import AcpfsMount

HEARTBEAT_S = 0.4
SOON_MISSING_S = 4.0
"""`node_timeout` of the tests of a node that is missing: longer than a busy machine stops one that
lives.
"""
QUICK: dict[str, object] = {
    "heartbeat": HEARTBEAT_S,
    "clock_bound": 0.1,
    "node_timeout": 120.0,
    "attr_timeout": 0.1,
    "retry_delay_min": 0.02,
    "retry_delay_max": 0.2,
    "ram": "64M",
}
"""About ten times as fast as by default, but for who is missing: a node that a busy machine stops
for a moment is not.
"""


class Stand:
    """A context manager; `nodes` are the mounts."""

    def __init__(
        self,
        tmp: Path,
        backings: Sequence[Path],
        transport: str = "native",
        *,
        offsets_s: Sequence[float] = (),
        environments: Callable[[int], dict[str, str]] | None = None,
        **options: object,
    ) -> None:
        """`offsets_s`: what each node's clock is ahead; a file, so that a test can set it.

        `environments`: more for node n.
        """
        self._stack = ExitStack()
        self.nodes: list[AcpfsMount] = []
        self._clocks = [tmp / f"clock{number}" for number in range(len(backings))]
        self.backings = list(backings)
        for number, backing in enumerate(backings):
            self.set_clock(number, offsets_s[number] if number < len(offsets_s) else 0.0)
            environment = {OFFSET_VARIABLE: str(self._clocks[number])}
            environment |= environments(number) if environments is not None else {}
            settings: dict[str, Any] = {**QUICK, "node_id": f"node{number}", **options}
            self.nodes.append(
                AcpfsMount(
                    backing, tmp / f"mnt{number}", transport, environment=environment, **settings
                )
            )

    def __enter__(self) -> Stand:
        try:
            for node in self.nodes:
                self._stack.enter_context(node)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, value, trace)

    def set_clock(self, number: int, ahead_s: float) -> None:
        """Set the wall clock of one node."""
        temporary = self._clocks[number].with_suffix(".new")
        temporary.write_text(str(ahead_s), encoding="ascii")
        temporary.replace(self._clocks[number])

    def paths(self) -> list[Path]:
        """Mount points."""
        return [node.path for node in self.nodes]
