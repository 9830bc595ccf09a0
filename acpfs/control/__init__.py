"""Control socket: protocol, server, client, registry of mounts, metrics.

Knows no FUSE and never touches a mount point.
"""
