"""What the backing directory shows, and how far that can be believed."""
