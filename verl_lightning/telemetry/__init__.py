"""Telemetry of a run: its time, its memory and its steps."""
