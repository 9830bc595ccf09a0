"""`acpfs-run`: starts the ranks of a node, sees them end, replaces or restarts them. No torch
here.
"""
