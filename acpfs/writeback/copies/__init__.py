"""The log and the state of a mount once more, elsewhere: for when RAM is lost."""
