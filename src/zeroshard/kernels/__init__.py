"""Arithmetic as kernels of its own for devices, compared with the functions that they stand in for."""
