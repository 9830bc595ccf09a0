"""The process that decides when a rank dies. Standard library and trio only; never imports
torch.
"""
