"""Which operations are next, and what waits for what."""
