"""What can be taken out: a file each, with a manifest of its hooks."""
