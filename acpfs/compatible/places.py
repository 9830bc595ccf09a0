"""Where the packages of the product's names lie."""

from pathlib import Path

SITE = Path(__file__).resolve().parent / "site"
"""What PYTHONPATH names; they are not installed at top level, where they would shadow the product itself."""
