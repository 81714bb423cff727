"""Qwen3-VL: names, structure, positions, preprocessing, reading and writing checkpoints, capture of activations."""
