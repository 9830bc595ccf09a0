"""Which mount a control command is about, and which paths in it: found by name, without touching
the mount.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from acpfs.cli import show
from acpfs.control import client, registry
from acpfs.control.registry import MountRecord
from acpfs.control.socket_messages import RemoteError, error_message
from acpfs.errors import AcpfsError, NotMountedError, RefusedError


@dataclass(frozen=True, slots=True)
class Target:
    """A mount, as named on the command line (None: the only one), or by the paths that lie in
    it.
    """

    mountpoint: str | None

    def record(self) -> MountRecord:
        """The mount.

        Raises:
            NotMountedError: there is none of that name.
            SeveralMountsError: there are several to choose from.
        """
        return registry.find(self.mountpoint)

    def with_paths(self, paths: Sequence[str]) -> tuple[MountRecord, list[str]]:
        """The mount, and the paths below its mount point.

        A path may also be given relative to a mount point that was named.

        Raises:
            NotMountedError: a path lies in no mount.
            RefusedError: paths lie in different mounts.
        """
        if not paths:
            return self.record(), []
        found = [self._locate(path) for path in paths]
        if len({record.mountpoint for record, _path in found}) > 1:
            raise RefusedError("the paths lie in different mounts")
        return found[0][0], [path for _record, path in found]

    def _locate(self, path: str) -> tuple[MountRecord, str]:
        try:
            record, below = registry.locate(path)
        except NotMountedError:
            if self.mountpoint is None or os.path.isabs(path):
                raise
            return self.record(), path
        if self.mountpoint is not None and record.mountpoint != self.record().mountpoint:
            raise RefusedError(f"{path} lies in {record.mountpoint}, not in {self.mountpoint}")
        return record, below


def ask(
    record: MountRecord,
    verb: str,
    args: dict[str, Any] | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    *,
    as_json: bool = False,
    patience_s: float | None = None,
) -> Any:
    """Ask a daemon; see `client.request`.

    An error goes on after what it says is left was shown: as a table to stderr, or the whole error
    as JSON to stdout.
    """
    try:
        return client.request(record, verb, args, on_event, patience_s=patience_s)
    except AcpfsError as error:
        if as_json:
            show.print_json(error_message(error))
        elif isinstance(error, RemoteError):
            show.left_over(error.details)
        raise
