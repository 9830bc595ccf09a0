"""Whether a path lies in a mount of acpfs, where symlinks in mounts lead elsewhere as well."""

from __future__ import annotations

import os

from acpfs.control import registry


def lies_in_mount(path: str) -> bool:
    """By the kernel's table, so that it is known in a container, too.

    Raises:
        AcpfsError: symlinks lead in a circle.
        OSError: the mount does not answer.
    """
    return registry.lies_in_mount(os.path.realpath(path))
