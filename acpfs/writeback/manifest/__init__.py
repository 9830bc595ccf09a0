"""Checksums of all that is persisted, and the files that say so."""
