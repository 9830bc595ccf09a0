"""acpfs: a FUSE mount that takes checkpoints at memory speed and drains them, in order, to a
backing directory.
"""

__version__ = "0.1.0"
