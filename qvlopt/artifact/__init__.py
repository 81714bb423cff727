"""Folders, manifests, digests and tensors on disk: what every command writes and reads."""
