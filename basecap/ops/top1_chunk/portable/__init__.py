"""Top-1 chunk selection in Triton, for every GPU from compute capability 8.0 on."""
