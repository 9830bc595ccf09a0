"""What becomes of an operation that failed."""
