"""Planning of training jobs: how often to save, what copies cover."""
