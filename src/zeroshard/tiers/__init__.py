"""Where a state rests: on the device, in host memory, or in files."""
