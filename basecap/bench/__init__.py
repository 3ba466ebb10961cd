"""Speed and memory: kernels beside their rivals, whole models beside each other."""
