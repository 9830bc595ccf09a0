"""Copies versions into staging files, ahead of the commits."""
