"""What happens before there is a worker, and after: looking at the machine, starting, taking the
mount point away.
"""
