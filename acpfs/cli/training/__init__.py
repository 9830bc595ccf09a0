"""Commands of `acpfs-train`."""
