"""What the tests share: a faulty backing file system, mounts, journals, helpers for many users and
processes.

Nothing here knows how acpfs works inside; it speaks to it through its command line, its control
socket and the mount point.
"""
