"""Top-1 chunk selection on Hopper GPUs, in Triton's lower dialect Gluon."""
