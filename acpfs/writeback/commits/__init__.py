"""Makes operations visible, and flushes them."""
