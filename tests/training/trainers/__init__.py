"""Trainers that keep their own loop, where ranks are replaced."""
