"""The upper layer's bytes: where the RAM tier lies, its files and budget, and the state database
beside them.
"""
