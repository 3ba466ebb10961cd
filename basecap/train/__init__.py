"""Training: one loop for every architecture, device and number of processes."""
