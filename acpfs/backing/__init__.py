"""The lower layer: every system call on the backing directory, its features, its health."""
