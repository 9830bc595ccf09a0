"""What a training process may import: is my checkpoint safe?

    from acpfs.client import wait_persisted
    torch.save(model.state_dict(), "/mnt/acp/run1/model.pt")
    wait_persisted("/mnt/acp/run1/model.pt", timeout_s=600)

Thin over the control socket: standard library only, no FUSE; blocking, but for `on_persisted`,
which calls back from a thread of its own. `acpfs.client.asynchronous` has the same for trio. A path
that is not on an acpfs mount is persisted as soon as its file system says so, which is not ours to
judge: `NotMountedError`.
"""

from acpfs.client.needs import node_id, set_needs
from acpfs.client.persistence import (
    Durability,
    durability,
    flush,
    status,
    wait_copied,
    wait_for_nodes,
    wait_persisted,
    wait_verified,
)
from acpfs.client.urgency import declare_urgent, withdraw_urgent
from acpfs.client.watching import (
    SafeCheckpoint,
    SafeFile,
    Watching,
    checkpoints,
    on_persisted,
    persisted_checkpoints,
)

__all__ = [
    "Durability",
    "SafeCheckpoint",
    "SafeFile",
    "Watching",
    "checkpoints",
    "declare_urgent",
    "durability",
    "flush",
    "node_id",
    "on_persisted",
    "persisted_checkpoints",
    "set_needs",
    "status",
    "wait_copied",
    "wait_for_nodes",
    "wait_persisted",
    "wait_verified",
    "withdraw_urgent",
]
