"""Where scripts import `CheckpointHelper` from."""

from acpfs.compatible.rank_checkpoints import CheckpointHelper

__all__ = ["CheckpointHelper"]
