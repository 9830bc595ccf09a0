"""A torch store over the link to the coordinator: what a group of savers meets through, whoever has
died.

torch calls it from the main thread, under its own names. `ask` raises where the generation is over,
so nobody waits here for the dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from acpfs.training.messages import Ask, StoreVerb

DEFAULT_TIMEOUT_S = 300.0


class LinkStore(dist.Store):  # type: ignore[misc]  # torch is Any where types are checked
    """Of one generation."""

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self._ask = ask
        self._timeout_s = DEFAULT_TIMEOUT_S

    def _said(
        self,
        verb: StoreVerb,
        keys: Sequence[str],
        value: str = "",
        expected: str = "",
        timeout_s: float | None = None,
    ) -> str:
        answer = self._ask(
            verb, tuple(keys), value, expected, self._timeout_s if timeout_s is None else timeout_s
        )
        if answer.late:
            raise dist.DistStoreError(f"nobody has set {', '.join(keys)} in time")
        return answer.value

    def set(self, key: str, value: Any) -> None:
        self._said(StoreVerb.SET, [key], _bytes(value).hex())

    def get(self, key: str) -> bytes:
        return bytes.fromhex(self._said(StoreVerb.GET, [key]))

    def add(self, key: str, amount: int) -> int:
        return int(self._said(StoreVerb.ADD, [key], str(amount)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._said(
            StoreVerb.WAIT, keys, timeout_s=None if timeout is None else timeout.total_seconds()
        )

    def check(self, keys: Sequence[str]) -> bool:
        return self._said(StoreVerb.CHECK, keys) == "1"

    def compare_set(self, key: str, expected: Any, value: Any) -> bytes:
        return bytes.fromhex(
            self._said(StoreVerb.COMPARE_SET, [key], _bytes(value).hex(), _bytes(expected).hex())
        )

    def delete_key(self, key: str) -> bool:
        return self._said(StoreVerb.DELETE, [key]) == "1"

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
