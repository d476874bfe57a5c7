"""Processes of a run: how they start, watch one another, hear signals and end."""
