"""Operation log, versions, streams, ordered commit, retry, manifest.

Knows no FUSE, no handles, no lookups.
"""
