"""Scores, intervals, verdicts: evaluate's domain. Knows engines by their protocol only."""
