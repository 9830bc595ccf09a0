"""Commands: `acpfs`, `acpfs-ctl`, `mount.acpfs`.

Parsing here, work behind the control socket or in `acpfs.supervisor`.
"""
