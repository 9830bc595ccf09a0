"""What the backing directory has not seen yet: operations, their order, who waits for them, and
what is there already.
"""
