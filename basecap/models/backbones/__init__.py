"""Block families, one file each; see `_contract.py`."""
