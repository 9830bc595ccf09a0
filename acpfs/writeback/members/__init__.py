"""Order between the mounts of one backing directory."""
