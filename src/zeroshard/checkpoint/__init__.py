"""Checkpoints: what is saved of a running model, in which format, and how any ranks, stage and tier load it."""
