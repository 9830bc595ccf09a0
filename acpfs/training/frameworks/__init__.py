"""One module per framework: `protect` with what that framework knows already, and its own checkpoints. Each imports its framework."""
