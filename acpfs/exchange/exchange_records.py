"""What members, and the two processes of one member, say to each other about files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import Any

EXCHANGE_VERSION = 1
"""Of what is said between members."""
GET_BYTES_MAX = 4 << 20
"""In one request."""
PART_BYTES = 8 << 20
"""What belongs to one member: large enough for a storage that likes long reads."""
PATH_BYTES_MAX = 4096
PUT_BYTES_MAX = 8 << 20
"""Of a file that is held, in one message: each costs four processes half a millisecond."""
PUT_BYTES_UNSAID = 4 << 20
"""The same, where a holder does not say how much it takes."""
KEY_CHARS = 64
"""Of a fingerprint: SHA-256 in hex."""

Message = dict[str, Any]


class Has(str, Enum):
    """What a member has of a version."""

    WHOLE = "whole"
    COMING = "coming"
    """It reads it, too, from the storage or from others."""
    NO = "no"
    """It may have it, and gives nothing now; or has it not."""


@dataclass(frozen=True, slots=True)
class Availability:
    """What a member has of a version, in parts of `PART_BYTES`."""

    has: Has
    parts: int = 0
    """While it comes: a bit for each part that is there, the first one's is the lowest."""

    def told(self) -> Message:
        """For a message."""
        return {"has": self.has.value, "parts": f"{self.parts:x}"}

    @classmethod
    def heard(cls, told: Message) -> Availability:
        """Inverse of `told`; what makes no sense is nothing."""
        parts = told.get("parts")
        try:
            return cls(Has(told.get("has")), int(parts, 16) if isinstance(parts, str) else 0)
        except ValueError:
            return cls(Has.NO)


@dataclass(frozen=True, slots=True)
class VersionName:
    """One version of one file of the volume: equal means the same bytes (S100)."""

    path: bytes
    """Below the backing directory."""
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int

    def identity(self) -> tuple[int, int, int, int]:
        """As `LowerStat.identity` has it."""
        return (self.ino, self.size, self.mtime_ns, self.ctime_ns)

    def told(self) -> Message:
        """For a message."""
        return {"path": os.fsdecode(self.path), "is": list(self.identity())}

    @classmethod
    def heard(cls, told: object) -> VersionName:
        """Inverse of `told`.

        Raises:
            ValueError: it is none.
        """
        if not isinstance(told, dict) or not isinstance(told.get("path"), str):
            raise ValueError("no version of a file")  # noqa: TRY004 - of content
        numbers = told.get("is")
        if (
            not isinstance(numbers, list)
            or len(numbers) != 4
            or not all(type(one) is int for one in numbers)
        ):
            raise ValueError("no version of a file")
        path = os.fsencode(told["path"])
        if len(path) > PATH_BYTES_MAX:
            raise ValueError("a path that is too long")
        return cls(path, *numbers)


@dataclass(frozen=True, slots=True)
class MemberAddress:
    """Where a member is reached, and by which key it is known."""

    node: str
    addresses: tuple[str, ...]
    port: int
    key: str
    """SHA-256 of its certificate (DER), in hex."""

    def told(self) -> Message:
        """For a message."""
        return {
            "node": self.node,
            "addresses": list(self.addresses),
            "port": self.port,
            "key": self.key,
        }

    @classmethod
    def heard(cls, told: Message) -> MemberAddress:
        """Inverse of `told`; between processes of one member."""
        return cls(told["node"], tuple(told["addresses"]), told["port"], told["key"])


def whole_number(message: Message, name: str, least: int, most: int) -> int:
    """A field of a message from another machine.

    Raises:
        ValueError: it is no such number.
    """
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name}: not a number from {least} to {most}")
    return value
