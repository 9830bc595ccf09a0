"""Calls on the backing directory: threads of their own, how long each has been out, and what that says about health.

A call may hang for ever; it then costs one thread of a bounded number and nothing else. Nothing here knows what is called.
"""
