"""Names in the checkpoints that `bench.rank` saves; apart, because its interpreter has torch and
others have not.
"""

MODEL = "model.pt"
POINTER = "latest"
"""Overwritten in place after each save: "step-" and the number."""
