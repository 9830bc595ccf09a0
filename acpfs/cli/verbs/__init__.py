"""The verbs of `acpfs-ctl`, one module each."""
