"""Where the bytes of versions are read: the RAM tier, the spill directory; and the mirror beside
it.
"""
