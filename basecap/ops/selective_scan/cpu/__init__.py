"""The selective scan compiled by Numba, for CPUs."""
