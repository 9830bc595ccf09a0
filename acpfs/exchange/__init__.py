"""Bytes between members: who has a version of a file gives ranges of it to who lacks them.

Knows descriptors, ranges and what a version looks like; nothing of logs, budgets or caches.
"""
