"""The store through which savers find each other: a few keys that live as long as a generation.

Pure: answers come with whose they are.
"""

from __future__ import annotations

from acpfs.training.messages import StoreAnswer, StoreAsk, StoreVerb

KEYS_MAX = 100_000
BYTES_MAX = 64 << 20
_WAITING = frozenset({StoreVerb.GET, StoreVerb.WAIT})


class Store:
    """One per generation."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._bytes = 0
        self._waiting: list[tuple[int, StoreAsk, float]] = []

    def ask(self, rank: int, asked: StoreAsk, now: float) -> list[tuple[int, StoreAnswer]]:
        """An operation; the answers that it makes possible, also to others."""
        if asked.verb in _WAITING:
            self._waiting.append((rank, asked, now + asked.timeout_s))
            return self._complete()
        return [(rank, self._changed(asked)), *self._complete()]

    def late(self, now: float) -> list[tuple[int, StoreAnswer]]:
        """Who has waited long enough."""
        late = [(rank, asked) for rank, asked, deadline in self._waiting if deadline <= now]
        self._waiting = [waiting for waiting in self._waiting if waiting[2] > now]
        return [(rank, StoreAnswer(asked.request, late=True)) for rank, asked in late]

    def end(self) -> list[tuple[int, StoreAnswer]]:
        """The generation is over: nobody waits any more."""
        return self.late(float("inf"))

    def _changed(self, asked: StoreAsk) -> StoreAnswer:
        key = asked.keys[0] if asked.keys else ""
        answer = ""
        if asked.verb is StoreVerb.CHECK:
            answer = str(int(all(key in self._values for key in asked.keys)))
        elif asked.verb is StoreVerb.DELETE:
            answer = str(int(key in self._values))
            self._bytes -= len(self._values.pop(key, ""))
        elif asked.verb is StoreVerb.COMPARE_SET:
            present = self._values.get(key, "")
            if present == asked.expected:
                self._put(key, asked.value)
            answer = self._values.get(key, asked.expected)
        elif asked.verb is StoreVerb.ADD:
            answer = str(
                _number(bytes.fromhex(self._values.get(key, "")).decode()) + _number(asked.value)
            )
            self._put(
                key, answer.encode().hex()
            )  # as torch's own stores keep it: what get returns is the number in digits
        else:
            self._put(key, asked.value)
        return StoreAnswer(asked.request, answer)

    def _put(self, key: str, value: str) -> None:
        grown = self._bytes + len(value) - len(self._values.get(key, ""))
        if grown <= BYTES_MAX and (key in self._values or len(self._values) < KEYS_MAX):
            self._values[key] = value
            self._bytes = grown

    def _complete(self) -> list[tuple[int, StoreAnswer]]:
        answers = []
        left = []
        for waiting in self._waiting:
            rank, asked, _ = waiting
            if all(key in self._values for key in asked.keys):
                value = (
                    self._values[asked.keys[0]]
                    if asked.verb is StoreVerb.GET and asked.keys
                    else ""
                )
                answers.append((rank, StoreAnswer(asked.request, value)))
            else:
                left.append(waiting)
        self._waiting = left
        return answers


def _number(text: str) -> int:
    return int(text) if text.lstrip("-").isdecimal() and len(text) < 20 else 0
