"""The meaning of every call, over the upper and the lower layer."""
