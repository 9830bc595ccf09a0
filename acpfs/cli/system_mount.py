"""`mount.acpfs` and `umount.fuse.acpfs`: what mount(8), umount(8) and fstab call.

`mount -t acpfs BACKING MOUNTPOINT -o ram=64G,fsync=durable,_netdev`: options are the settings'
names; the standard ones that mean nothing to acpfs are passed over, those that it cannot honour and
unknown ones are refused. Exit codes are mount(8)'s.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from acpfs.errors import AcpfsError, ConfigError, ExitCode

MOUNT_USAGE = 1
MOUNT_FAILED = 32
IGNORED = frozenset(
    "rw auto noauto nofail _netdev defaults user nouser users owner group async relatime "
    "norelatime strictatime nostrictatime lazytime "
    "nolazytime noatime atime nodiratime diratime nosuid nodev suid dev exec iversion "
    "noiversion loud silent nomand".split()
)
"""nosuid and nodev always hold for FUSE mounts; the others are for mount(8), systemd and the
kernel.
"""
IGNORED_PREFIXES = ("x-", "X-", "comment=", "uhelper=", "helper=")
REFUSED = {
    "ro": "a mount is always writable",
    "noexec": "not supported",
    "sync": "use fsync=durable and O_SYNC",
    "dirsync": "use fsync=durable",
}
BOOLEANS = {"yes": True, "true": True, "1": True, "": True, "no": False, "false": False, "0": False}


def parse_options(text: str, *, sloppy: bool = False) -> dict[str, Any]:
    """Settings (and `config`) from `-o`.

    Raises:
        ConfigError: an option that is unknown (unless sloppy) or that cannot be honoured.
    """
    from acpfs.config import FIELDS, field_named

    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _equals, value = part.partition("=")
        if name in IGNORED or part.startswith(IGNORED_PREFIXES):
            continue
        if name in REFUSED:
            raise ConfigError(f"mount option {name}: {REFUSED[name]}")
        field = "config" if name == "config" else field_named(name)
        if field is None or field in ("backing", "mountpoint"):
            if sloppy:
                continue
            raise ConfigError(f"unknown mount option {name!r}")
        boolean = field in FIELDS and FIELDS[field].type is bool
        values[field] = BOOLEANS.get(value.lower(), value) if boolean else value
    return values


def parse_arguments(arguments: list[str]) -> tuple[str, str, str, set[str]]:
    """(backing, mount point, options, flags) from `BACKING MOUNTPOINT [-sfnvrw] [-N NS] [-t TYPE]
    [-o OPTIONS]`.
    """
    places: list[str] = []
    options: list[str] = []
    flags: set[str] = set()
    rest = iter(arguments)
    for word in rest:
        if word in ("-o", "-t", "-N"):
            value = next(rest, None)
            if value is None:
                raise ConfigError(f"{word} needs a value")
            if word == "-o":
                options.append(value)
        elif word.startswith("-o"):
            options.append(word[2:])
        elif word.startswith("-") and set(word[1:]) <= set("sfnvrwi"):
            flags |= set(word[1:])
        elif word.startswith("-"):
            raise ConfigError(f"unknown flag {word}")
        else:
            places.append(word)
    if len(places) != 2:
        raise ConfigError("usage: mount.acpfs BACKING MOUNTPOINT [-o OPTIONS]")
    return places[0], places[1], ",".join(options), flags


def main() -> NoReturn:
    """Entry point of mount.acpfs."""
    try:
        backing, mountpoint, text, flags = parse_arguments(sys.argv[1:])
        if "r" in flags:
            raise ConfigError(f"mount option ro: {REFUSED['ro']}")
        values = parse_options(text, sloppy="s" in flags)
        if "f" in flags:
            sys.exit(0)
        from pathlib import Path

        from acpfs.cli.mount import mount

        config = values.pop("config", None)
        sys.exit(
            mount(
                {**values, "backing": backing, "mountpoint": mountpoint},
                Path(config) if config else None,
                foreground=False,
            )
        )
    except AcpfsError as error:
        print(f"mount.acpfs: {error}", file=sys.stderr)
        sys.exit(MOUNT_USAGE if error.exit_code is ExitCode.USAGE else MOUNT_FAILED)


def umount_main() -> NoReturn:
    """Entry point of umount.fuse.acpfs: `umount MOUNTPOINT` drains first. -l: leave what is not
    persisted in the RAM tier.
    """
    words = sys.argv[1:]
    flags = "".join(
        word[1:] for word in words if word.startswith("-") and not word.startswith("--")
    )
    places = [
        word
        for index, word in enumerate(words)
        if not word.startswith("-") and (index == 0 or words[index - 1] not in ("-t", "-N"))
    ]
    try:
        if len(places) != 1:
            raise ConfigError("usage: umount.fuse.acpfs MOUNTPOINT [-nlfvr]")
        from acpfs.cli.umount import umount

        hurry = "l" in flags or "f" in flags
        umount(places[0], 0.0 if hurry else None, leave=hurry)
        sys.exit(0)
    except AcpfsError as error:
        print(f"umount: {error}", file=sys.stderr)
        sys.exit(MOUNT_USAGE if error.exit_code is ExitCode.USAGE else MOUNT_FAILED)
