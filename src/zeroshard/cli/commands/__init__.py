"""What each command can be asked: its options and its help. What it then does is in a file of `cli/`."""
