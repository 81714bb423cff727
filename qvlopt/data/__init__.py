"""Samples and pictures: what every command reads, by one set of policies."""
