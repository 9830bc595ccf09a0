"""What the daemon takes of the machine by itself: time, threads, its load, chance.

Below everything else.
"""
