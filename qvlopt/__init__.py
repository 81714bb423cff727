"""qvlopt: quantises the vision side of Qwen3-VL checkpoints and proves what it cost. Importing it loads nothing heavy."""

__version__ = "0.1.0"
