"""The recipe: its schema, loading with every problem at once, and what ships with the package. Loads no torch."""
