"""Sequence mixers: one file per architecture, found by scanning; see `_contract.py` for what a file holds."""
