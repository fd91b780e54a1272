"""Tiers, in which states rest: the device, host memory, and files."""
