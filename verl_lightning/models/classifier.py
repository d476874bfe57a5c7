"""Reward models as transformers knows them: sequence classification with one label, whose head is called ``score``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PretrainedConfig, PreTrainedModel

SCORE = "score.weight"
"""Name of the head's weight in a file."""


def classifier_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class of transformers that classifies sequences with a model of these settings.

    Raises:
        ValueError: If there is none.
    """
    found = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if not isinstance(found, type):
        raise ValueError(
            f"`model.actor.path`: transformers has no sequence classification for `{config.model_type}`, so no reward"
            " model of it could be written. Choose another model, such as a Llama or a Qwen."
        )
    assert issubclass(found, PreTrainedModel)
    return found


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """The part of a reward model that its trunk lacks."""

    score: Tensor
    """Weight of the head, whole."""

    pad_token_id: int
    """Token of the padding, which tells transformers where a sequence ends."""

    def complete(self, weights: Iterable[tuple[str, Tensor]], config: PretrainedConfig) -> Iterator[tuple[str, Tensor]]:
        """Yields the trunk's weights under the names that they have in the whole model, then the head's."""
        prefix = classifier_class(config).base_model_prefix
        for name, weight in weights:
            yield f"{prefix}.{name}", weight
        yield SCORE, self.score

    def describe(self, config: PretrainedConfig) -> None:
        """Makes the trunk's settings those of the whole model."""
        config.architectures = [classifier_class(config).__name__]
        config.num_labels = 1
        config.pad_token_id = self.pad_token_id


def classifier_of(role: str, head: str, weights: Mapping[str, Tensor], pad_token_id: int | None) -> Classifier | None:
    """What makes a reward model of a run's model; None for a model that is no reward model.

    Args:
        role: Name of the model in its run; a critic has values too, but of tokens.
        head: Scores that the model gives.
        weights: Weights of its value head.
        pad_token_id: Token of the padding.
    """
    if role != "actor" or head != "value":
        return None
    assert pad_token_id is not None
    return Classifier(score=weights["weight"], pad_token_id=pad_token_id)
