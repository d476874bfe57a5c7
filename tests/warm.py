"""Does once, in the fork server, what each run would: transformers compiles its expressions for names of weights."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")  # it keeps those of all models
