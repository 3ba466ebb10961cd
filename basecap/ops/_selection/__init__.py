"""What Top-1 chunk and Top-1 element selection share: checks of inputs and caches, and lists of who chose what."""
