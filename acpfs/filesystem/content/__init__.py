"""Where the bytes of regular files are: one `Body` for each, what moves them, and who decides that
they move.
"""
