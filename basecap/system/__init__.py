"""What the operating system gives: files, locks, processes, progress, streams, the environment."""
