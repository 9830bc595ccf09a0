"""What a training process may import: is my checkpoint safe?

    from acpfs.training import wait_persisted
    torch.save(model.state_dict(), "/mnt/acp/run1/model.pt")
    wait_persisted("/mnt/acp/run1/model.pt", timeout_s=600)

Thin over the control socket: standard library only, no FUSE, no threads, blocking. A path that is not on an acpfs mount is
persisted as soon as its file system says so, which is not ours to judge: `NotMountedError`.
"""

from acpfs.training.persistence import flush, status, wait_persisted, wait_verified

__all__ = ["flush", "status", "wait_persisted", "wait_verified"]
