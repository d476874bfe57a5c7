"""A reward of one's own, which even a policy that has learnt nothing yet gets a part of."""

from __future__ import annotations

from verl_lightning.rewards import RewardSample


def right_places(sample: RewardSample) -> float:
    """Share of the answer's characters that the response has in the same place.

    Args:
        sample: Its ``ground_truth`` is the answer.

    Returns:
        Between 0 and 1.
    """
    answer = str(sample.ground_truth)
    return sum(given == right for given, right in zip(sample.response, answer, strict=False)) / len(answer)
