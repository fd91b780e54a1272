"""Formats and tools of others: checkpoints, weights, configs, traces and trainers."""
