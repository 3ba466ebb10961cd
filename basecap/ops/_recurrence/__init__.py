"""Shared by the recurrences: blocks of tokens in plain PyTorch, and Triton kernels that process one token at a time."""
