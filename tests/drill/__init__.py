"""The drill: everything is killed, at any time, and an independent journal says afterwards what
must be there.
"""
