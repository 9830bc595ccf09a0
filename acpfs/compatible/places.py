"""Where the packages of the product's names lie."""

from pathlib import Path

SITE = Path(__file__).resolve().parent / "site"
"""What PYTHONPATH names; they are not installed at top level, where they would shadow the product
itself.
"""
ORIGIN = Path(__file__).resolve().parent / "origin.py"
"""Makes this acpfs importable in an interpreter that has none."""
