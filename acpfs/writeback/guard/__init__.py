"""A deleted checkpoint stays until a newer one is persisted."""
