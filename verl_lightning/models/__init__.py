"""Hugging Face models as scorers of response tokens."""
