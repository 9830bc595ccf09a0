"""Settings: one validated schema, one place for defaults, units in the names.

Precedence: command line, then TOML file, then the defaults here. Keys in the file are the field names; the command line's
options are the same names with dashes and without unit suffix. An unknown key or a nonsense value is a `ConfigError` that names it.
"""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([kmgtp]?)(?:i?b)?$", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_size(value: object) -> int:
    """Bytes from `64G`, `512MiB`, `1.5t` or a number; factors of 1024, as mount options have them.

    Raises:
        ValueError: not a size.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.match(str(value).strip())
    if match is None:
        raise ValueError(f"{value!r} is not a size such as 64G or 512M")
    return int(float(match[1]) * 1024 ** _POWER[match[2].lower()])


def _parse_ram(value: object) -> int | str:
    text = str(value).strip()
    if text.endswith("%"):
        percent = float(text[:-1])
        if not 0 < percent <= 90:
            raise ValueError("a share of memory must lie between 0% and 90%")
        return text
    return parse_size(value)


Size = Annotated[int, BeforeValidator(parse_size)]
RamSize = Annotated[int | str, BeforeValidator(_parse_ram)]
Seconds = Annotated[float, Field(ge=0)]


class Transport(str, Enum):
    """How the kernel is spoken to."""

    AUTO = "auto"
    NATIVE = "native"
    LIBFUSE = "libfuse"


class FsyncMode(str, Enum):
    """What fsync means; docs/SEMANTICS.md."""

    ORDERED = "ordered"
    DURABLE = "durable"


class WhenFull(str, Enum):
    """What a writer meets when the RAM tier is full of dirty bytes."""

    WAIT = "wait"
    NATIVE = "native"
    ERROR = "error"


DEFAULT_POINTER_PATTERNS = (
    "latest",
    "latest_*",
    "*tracker*",
    "latest_checkpointed_iteration.txt",
    ".metadata",
    "commit_success.txt",
    "*.index.json",
    "trainer_state.json",
)


class Settings(BaseModel):
    """Everything that a mount can be told."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    backing: Path
    mountpoint: Path
    ram: RamSize = "25%"
    """Budget of the RAM tier: bytes, or percent of what the machine or cgroup has."""
    transport: Transport = Transport.AUTO
    fsync: FsyncMode = FsyncMode.ORDERED
    node_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] | None = None
    """This mount's identity among all that share the backing directory; default: machine-id based, see `acpfs.backing.identity`."""
    streams: Annotated[int, Field(ge=1, le=256)] = 8
    """Files copied to the backing directory at the same time."""
    bandwidth: Size = 0
    """Most bytes per second that streams may write together; 0: no limit."""
    when_full: WhenFull = WhenFull.WAIT
    max_dirty_age_s: Seconds = 30.0
    """A file that stays open is committed as of now this often; 0: never."""
    verify_after_write: bool = False
    attr_timeout_s: Seconds = 1.0
    """How old knowledge about the backing directory may be."""
    patience_s: Seconds = 1.0
    """How long a request waits for the backing directory when there is older knowledge to go on with."""
    backing_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """How long a request waits for the backing directory when there is not; then EIO."""
    drain_timeout_s: Seconds = 600.0
    """How long SIGTERM and umount drain before they give up and keep the rest."""
    retry_delay_min_s: Annotated[float, Field(gt=0)] = 0.2
    retry_delay_max_s: Annotated[float, Field(gt=0)] = 60.0
    pointer_patterns: tuple[str, ...] = DEFAULT_POINTER_PATTERNS
    """Names of files that point at other files; committed only when all that precedes them is flushed."""
    allow_other: bool = True
    control_group: str | None = None
    """Group that may use the control socket besides its owner."""
    runtime_dir: Path | None = None
    """Where sockets and RAM tiers live; default /run/acpfs for root, else $XDG_RUNTIME_DIR/acpfs."""
    log_level: Annotated[str, Field(pattern=r"^(debug|info|warning|error)$")] = "info"
    log_file: Path | None = None
    """Rotating log file (10 MB × 5); default: stderr, which systemd takes to the journal."""
