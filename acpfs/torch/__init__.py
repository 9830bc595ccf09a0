"""`torch.save` and `torch.load` at the speed of the mount: the same files, and the same objects.

    import acpfs.torch

    acpfs.torch.save(state, "/mnt/acp/run1/model.pt")  # byte for byte what torch.save writes
    state = acpfs.torch.load("/mnt/acp/run1/model.pt")
    acpfs.torch.install()  # or: from here on torch.save and torch.load are these
    dcp.save(state, storage_writer=acpfs.torch.Writer("/mnt/acp/run1/step-7"))

Whatever lies in no mount, or is unusual, is torch's own call (clauses T216 to T223).
Together with `acpfs.training` the only package that imports torch; no mount needs it.
"""

from typing import Any

from acpfs.torch.installing import install, uninstall
from acpfs.torch.loading import load
from acpfs.torch.saving import ArchiveWriteError, save

__all__ = ["ArchiveWriteError", "Writer", "install", "load", "save", "uninstall"]


def __getattr__(name: str) -> Any:
    """`Writer` is there when it is asked for: what it needs of torch takes long to import."""
    if name != "Writer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from acpfs.torch.distributed import Writer

    return Writer
