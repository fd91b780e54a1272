"""Device kernels of our own for arithmetic, compared with the functions that they replace."""
