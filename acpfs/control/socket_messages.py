"""What travels over the control socket: one request per connection, one JSON object per line.

Request:  {"verb": "flush", "args": {…}}
Answers: {"event": "progress", …} and {"event": "items", "items": […]} as often as there is
something to say, then exactly one of
          {"result": …} or {"error": {"exit_code": n, "message": "…"}}.

Strings carry file names that are not UTF-8 as lone surrogates, escaped, as os.fsdecode makes them.
Knows neither sockets nor verbs.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acpfs.errors import (
    AcpfsError,
    ConfigError,
    DeadlineError,
    ExitCode,
    MachineError,
    NotMountedError,
    RefusedError,
)

REQUEST_BYTES_MAX = 1 << 20
SOCKET_PATH_BYTES_MAX = 107
"""sun_path holds 108 bytes with its NUL."""

Json = dict[str, Any]

_ERRORS: dict[int, type[AcpfsError]] = {
    kind.exit_code: kind
    for kind in (
        AcpfsError,
        ConfigError,
        DeadlineError,
        MachineError,
        NotMountedError,
        RefusedError,
    )
}


class BadRequestError(AcpfsError):
    """A request that makes no sense; the daemon answers so and goes on."""

    exit_code = ExitCode.USAGE


class RemoteError(AcpfsError):
    """Error as a daemon reported it, with what it said beside the message."""

    def __init__(self, message: str, details: Json) -> None:
        super().__init__(message)
        self.details = details


class RemoteDeadlineError(RemoteError, DeadlineError):
    """A deadline that passed, with what is left."""


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """A verb and its arguments, with typed access that names what is wrong."""

    verb: str
    args: Json = field(default_factory=dict)
    uid: int = -1
    """Who asks, as the kernel vouches for it; -1: nobody has been asked."""

    def text(self, key: str) -> str:
        value = self.args.get(key)
        if not isinstance(value, str):
            raise BadRequestError(f"{self.verb}: {key} must be a string")
        return value

    def flag(self, key: str) -> bool:
        value = self.args.get(key, False)
        if not isinstance(value, bool):
            raise BadRequestError(f"{self.verb}: {key} must be true or false")
        return value

    def seconds(self, key: str) -> float | None:
        """A duration; None when it is absent."""
        value = self.args.get(key)
        if value is not None and (
            not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1e9
        ):
            raise BadRequestError(f"{self.verb}: {key} must be a number of seconds")
        return None if value is None else float(value)

    def paths(self, key: str = "paths") -> list[bytes]:
        """Paths below the mount point; empty when absent."""
        value = self.args.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise BadRequestError(f"{self.verb}: {key} must be a list of strings")
        return [path_from_text(item) for item in value]

    def some_paths(self) -> list[bytes]:
        """At least one path below the mount point."""
        paths = self.paths()
        if not paths:
            raise BadRequestError(f"{self.verb}: name at least one path")
        return paths

    def one_path(self) -> bytes:
        """The only path."""
        paths = self.paths()
        if len(paths) != 1:
            raise BadRequestError(f"{self.verb}: name exactly one path")
        return paths[0]


def path_from_text(text: str) -> bytes:
    """A path below the mount point, as bytes.

    Raises:
        BadRequestError: it leaves the mount, or is no file name at all.
    """
    try:
        path = os.fsencode(text)
    except UnicodeEncodeError as error:
        raise BadRequestError(f"{text!r} is not a file name") from error
    if b"\0" in path or path.startswith(b"/") or b".." in path.split(b"/"):
        raise BadRequestError(f"{text!r} is not a path below the mount point")
    return path.strip(b"/")


def encode(message: Json) -> bytes:
    """One line. Everything outside ASCII is escaped, so a lone surrogate survives."""
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


def decode_request(line: bytes) -> ControlRequest:
    """A request from its line.

    Raises:
        BadRequestError: not JSON, not an object, no verb.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRequestError("the request is not a line of JSON") from error
    if (
        not isinstance(message, dict)
        or not isinstance(message.get("verb"), str)
        or not isinstance(message.get("args", {}), dict)
    ):
        raise BadRequestError('a request is {"verb": "…", "args": {…}}')
    return ControlRequest(message["verb"], message.get("args", {}))


def error_message(error: AcpfsError) -> Json:
    """The last line of a failed request."""
    details = error.details if isinstance(error, RemoteError) else {}
    return {"error": {"exit_code": int(error.exit_code), "message": str(error), **details}}


def error_from(message: Json) -> AcpfsError:
    """The exception that a failed request's last line stands for."""
    details = dict(message["error"])
    text = details.pop("message")
    code = details.pop("exit_code")
    if not details:
        return _ERRORS.get(code, AcpfsError)(text)
    error = (
        RemoteDeadlineError(text, details)
        if code == ExitCode.TIMEOUT
        else RemoteError(text, details)
    )
    error.exit_code = ExitCode(code)
    return error


def socket_address(path: Path) -> tuple[str, int | None]:
    """Address for bind and connect, and a directory descriptor to close afterwards: a path that is
    too long goes through /proc/self/fd.
    """
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        return os.fspath(path), None
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{fd}/{path.name}", fd
