"""Whom a pointer waits for: the nodes that wrote what it names, instead of all that mount the
backing directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from acpfs.control import registry
from acpfs.errors import AcpfsError, NotMountedError

StrPath = str | os.PathLike[str]
NEEDS_XATTR = "user.acpfs.needs"


def set_needs(path: StrPath, nodes: Iterable[str]) -> None:
    """Have the next pointer that a file or directory becomes (by rename, link, or its close) wait
    for these nodes, and for no other.

    Call it before that rename, or before the close of a pointer that is written in place. `nodes`:
    ids as `acpfs-ctl nodes` and `node_id` tell them; name every node that wrote something that the
    pointer names. This one need not be named.

    Raises:
        acpfs.errors.NotMountedError: the path lies in no acpfs mount: there nothing waits for
            nodes, and nothing has to be said.
        acpfs.errors.AcpfsError: it is not a node id, or the file is somebody else's, or gone.
    """
    record, _below = registry.locate(os.fspath(path))
    try:
        os.setxattr(path, NEEDS_XATTR, ",".join(nodes).encode())
        is_native = NEEDS_XATTR in os.listxattr(
            path
        )  # a mount never lists it: no daemon is there, and the storage has it now
        if is_native:
            os.removexattr(path, NEEDS_XATTR)
    except OSError as error:
        raise AcpfsError(f"{os.fspath(path)}: {NEEDS_XATTR}: {error.strerror}") from error
    if is_native:
        raise NotMountedError(
            f"{record.mountpoint} is native now: nothing there waits for other nodes"
        )


def node_id(path: StrPath) -> str:
    """The id of this node's mount that a path lies in.

    Raises:
        acpfs.errors.NotMountedError: it lies in none.
    """
    record, _below = registry.locate(os.fspath(path))
    return record.node
