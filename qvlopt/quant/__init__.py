"""Quantisation as tensor code: numbers in, numbers out. Knows nothing of modules, checkpoints, recipes or files."""
