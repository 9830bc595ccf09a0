"""What concerns training beside the mount: how often to save, and which losses copies of the state cover. Never imports torch."""
