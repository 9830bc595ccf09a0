"""Tests of acpfs; `tests.rig` holds what they share."""
