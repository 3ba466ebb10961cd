"""Public checks for mixers and ops: ours and those of plugins."""
