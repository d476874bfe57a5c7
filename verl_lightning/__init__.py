"""RL post-training of language models as Lightning modules, strategies and callbacks."""
