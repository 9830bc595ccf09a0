"""Who may commit the log of a member that is lost."""
