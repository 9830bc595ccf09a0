"""Adapters between the kernel and the file system: `libfuse` (pyfuse3) and `native` (/dev/fuse
itself).
"""
