"""The recurrence of RWKV-7 by chunks of tokens, in Triton."""
