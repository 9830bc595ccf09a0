"""acpfs: a FUSE mount that takes checkpoints at memory speed and drains them, in order, to a
backing directory.
"""

__version__ = "1.0.0rc1"
