"""The recurrence of RWKV-5 and 6 by chunks of tokens, in Triton."""
