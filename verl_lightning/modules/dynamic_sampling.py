"""Dynamic sampling: an iteration learns from groups with signal alone, others take the place of the rest."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor

from verl_lightning.faults import RunError
from verl_lightning.functional.groups import group_statistics
from verl_lightning.modules.judge import RewardResult, first_failure, told_failure
from verl_lightning.modules.ppo_config import DynamicSamplingConfig
from verl_lightning.modules.scored_rollout import join_results
from verl_lightning.types import Rollout


class DynamicSampling:
    """Tells whoever samples which groups have signal, and keeps their rewards for the iteration that learns from them.

    Args:
        config: Limit on what is sampled for an iteration.
    """

    def __init__(self, config: DynamicSamplingConfig) -> None:
        self.config = config
        self._judged: list[RewardResult] = []  # all that was judged for the next iteration
        self._rollout: Rollout | None = None
        self._result: RewardResult | None = None

    def sift(self, result: RewardResult, prompt_index: Int[Tensor, " batch"]) -> list[RewardResult | None]:
        """Returns the rewards of each group that has signal, and None for each other one.

        Args:
            result: Rewards of some groups.
            prompt_index: Number of each response's group, from 0 on.
        """
        self._judged.append(result)
        has_signal = group_statistics(result.rewards, prompt_index, result.is_valid).has_signal
        members = [prompt_index == group for group in range(int(prompt_index.max()) + 1)]
        return [result.select(own.nonzero().squeeze(-1)) if bool((own & has_signal).any()) else None for own in members]

    def too_few_message(self, found: int, needed: int) -> str:
        """Says why a run stops that finds too few groups with signal.

        Args:
            found: Prompts with signal of the rank that has the fewest.
            needed: Prompts of a rank in an iteration.
        """
        return (
            f"`model.dynamic_sampling` found {found} of {needed} prompts of a rank with both good and bad responses in"
            f" {self.config.max_batches} batches (`model.dynamic_sampling.max_batches`): the task is too easy or too"
            " hard. Choose other prompts, sample more responses to each, or allow more batches."
            f"{told_failure(first_failure(self._judged))}"
        )

    def hand_over(self, rollout: Rollout, parts: Sequence[RewardResult]) -> None:
        """Takes what the next iteration learns from.

        Args:
            rollout: Responses of an iteration.
            parts: Rewards of their groups.
        """
        self._rollout, self._result = rollout, join_results(parts, rollout.response_mask.shape[1])

    def take(self, rollout: Rollout) -> tuple[RewardResult, list[RewardResult]]:
        """Returns the rewards of an iteration's responses, and those of all groups that were judged for it.

        Args:
            rollout: Responses of the iteration.

        Raises:
            RunError: If nobody has chosen them.
        """
        result, self._result = self._result, None
        if result is None or self._rollout is not rollout:
            raise RunError(
                "`model.dynamic_sampling` needs a rollout callback that samples until there are enough groups with"
                " signal, such as `HFRollout` or `VLLMRollout`. Take one of these, or `model.dynamic_sampling` out."
            )
        judged, self._judged, self._rollout = self._judged, [], None
        return result, judged
