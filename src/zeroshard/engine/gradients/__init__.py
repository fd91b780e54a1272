"""Gradients: caught in backward, summed over the ranks, and shown as `.grad`."""
