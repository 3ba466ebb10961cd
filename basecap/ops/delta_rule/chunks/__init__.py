"""The delta rule by chunks of tokens, in Triton."""
