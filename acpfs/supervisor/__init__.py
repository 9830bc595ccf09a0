"""From settings to a running worker: checks, the daemon process, mount point, logs, service
manager.
"""
