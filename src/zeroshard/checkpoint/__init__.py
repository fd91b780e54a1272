"""What is saved of a running model, in which format, and how it is loaded by any ranks, stage and tier."""
