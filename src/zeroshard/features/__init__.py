"""Features that can be taken out: one file each, with a manifest of its hooks."""
