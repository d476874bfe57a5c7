"""What a run tells of its time, its memory and its steps."""
