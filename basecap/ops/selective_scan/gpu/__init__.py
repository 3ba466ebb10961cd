"""The selective scan in Triton, for GPUs."""
