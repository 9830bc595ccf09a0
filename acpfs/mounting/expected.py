"""Which volume is expected at a backing directory's path: the one that lay there at the last mount,
remembered outside RAM.

After a reboot the backing file system may not be mounted. Its bare mount point is an empty
directory like any other: a mount there would make a new volume, drain to the local disk, and be
hidden by the real file system later. What a RAM tier knows (`check_not_bare`) is gone then. Blocks
as the backing directory does; used at the first start of a mount only.
"""

from __future__ import annotations

import os
from pathlib import Path

from acpfs.backing.anchor import volume_at
from acpfs.config import ANY_VOLUME, REMEMBERED_VOLUME, Settings
from acpfs.errors import RefusedError
from acpfs.mounting.remembered import RememberedFile
from acpfs.ram.mounts import kind_at


class ExpectedVolume:
    """What is remembered of one backing directory's path."""

    def __init__(self, settings: Settings, runtime_dir: Path) -> None:
        self._settings = settings
        self._file = RememberedFile(settings, runtime_dir, "volumes")

    def check(self) -> None:
        """Before anything is made in the directory.

        Raises:
            RefusedError: something else lies there than is expected.
        """
        if self._settings.new_volume or self._settings.expect_volume == ANY_VOLUME:
            return
        found, kind = self._look()
        volume, last_kind = self._expected()
        if volume and found != volume:
            what = "a volume that acpfs has used" if not found else f"that volume, but {found}"
            was = (
                "its file system was not noted"
                if not last_kind
                else f"its file system was {last_kind}, here is {kind}"
                if _same(kind) != _same(last_kind)
                else f"on another {kind}"
            )
            self._refuse(f"is not {what}: {volume} is expected there ({was})")
        if volume and last_kind and _same(kind) != _same(last_kind):
            self._refuse(
                f"lies on {kind} now, and its volume {volume} lay on {last_kind} at the last mount"
            )

    def _refuse(self, why: str) -> None:
        raise RefusedError(
            f"{self._settings.backing} {why}. Is its file system mounted? If it is what you "
            "want, mount once with --new-volume"
        )

    def remember(self, volume: str) -> None:
        """What is mounted now. Where that cannot be noted, the next mount expects nothing."""
        noted: dict[str, object] = {
            "backing": os.fspath(self._settings.backing),
            "volume": volume,
            "kind": self._look()[1],
        }
        if self._file.read() != noted:
            self._file.write(noted)

    def _expected(self) -> tuple[str, str]:
        """(volume, kind of its file system); "" for what is not known."""
        noted = self._file.read()
        if self._settings.expect_volume != REMEMBERED_VOLUME:
            return self._settings.expect_volume, ""
        return str(noted.get("volume", "")), str(noted.get("kind", ""))

    def _look(self) -> tuple[str, str]:
        fd = os.open(self._settings.backing, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return volume_at(fd), kind_at(fd)
        finally:
            os.close(fd)


def _same(kind: str) -> str:
    """One server's file system, whatever version of its protocol a client speaks."""
    return "nfs" if kind == "nfs4" else kind
