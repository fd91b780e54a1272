"""Sums, norms, formats of 8 and 16 bits, and digests, with the same bits on every device."""
