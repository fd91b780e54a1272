"""A step: what is launched when, and the optimizer on this rank's fragments."""
