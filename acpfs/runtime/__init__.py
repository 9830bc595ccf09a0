"""What the daemon takes of the machine by itself: time, threads, chance. Below everything else."""
