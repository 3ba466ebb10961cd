"""Evaluations, one file each; see `_contract.py`."""
