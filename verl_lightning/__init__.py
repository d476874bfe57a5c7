"""RL post-training of language models as Lightning modules, strategies and callbacks."""

__version__ = "0.1.0.dev0"
