"""Measurements: each program here prints a table and saves it, with its command, under
bench/results.
"""
