"""Logs of runs, of any engine: what each step's losses, gradients and weights were, and where two runs part.

record      `RunLog`, which any training loop writes
read        a run's logs, checked
parting     the first difference of two runs, and of what kind it is
"""
