"""The worker: what one is made of, what it does besides serving calls, and what control sees of
it.
"""
