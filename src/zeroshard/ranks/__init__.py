"""What ranks move, how they agree, and who is gone: the only room that knows of processes."""
