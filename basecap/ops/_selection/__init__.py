"""Shared by Top-1 chunk and Top-1 element selection: checks of inputs and caches, and the inverse of the choice."""
