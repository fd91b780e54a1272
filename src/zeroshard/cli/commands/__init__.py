"""The commands' options and helps; what a command does is in a file of `cli/`."""
