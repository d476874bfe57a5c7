"""REINFORCE++: discounted rewards, whitened over the batch, with or without the prompt's mean as baseline."""

from __future__ import annotations

from verl_lightning.algorithms.advantages.base import AdvantageEstimator, AdvantageInputs, AdvantageOutputs
from verl_lightning.algorithms.advantages.grpo import grpo_advantages
from verl_lightning.algorithms.checks import check_in_unit_interval
from verl_lightning.functional.returns import discounted_returns


class ReinforcePlusPlus(AdvantageEstimator):
    """REINFORCE++: the discounted reward from each token on, whitened over the batch; no critic and no groups.

    Hu et al., 2025, https://arxiv.org/abs/2501.03262

    Args:
        gamma: Discount per response token, in ``[0, 1]``.
    """

    whitens = True

    def __init__(self, gamma: float = 1.0) -> None:
        check_in_unit_interval("gamma", gamma)
        self.gamma = gamma

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """The return of each trainable token."""
        return AdvantageOutputs(
            advantages=discounted_returns(inputs.token_rewards, inputs.valid_mask, discount=self.gamma)
        )


class ReinforcePlusPlusBaseline(AdvantageEstimator):
    """REINFORCE++ with the mean score of the prompt's responses as baseline, whitened over the batch.

    Whitening shifts and scales all advantages alike, so that responses of a prompt without signal don't stay at 0.

    Hu et al., 2025, https://arxiv.org/abs/2501.03262
    """

    needs_groups = True
    whitens = True

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """One advantage per response, on each of its trainable tokens."""
        advantages = grpo_advantages(
            inputs.sequence_returns, inputs.group_index, inputs.is_valid, normalize_by_std=False
        )
        return inputs.on_each_token(advantages)
