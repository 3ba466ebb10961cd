"""What the recurrences share: blocks of tokens in plain PyTorch, and Triton kernels that walk token by token."""
