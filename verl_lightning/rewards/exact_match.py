"""The reward for responses that must be the answer and nothing else."""

from __future__ import annotations

from verl_lightning.rewards.base import RewardSample


def exact_match(sample: RewardSample) -> float:
    """1 if the response is the ground truth, up to white space around it, else 0.

    A truncated response never matches, for the policy had not finished; nor does an empty one.

    Args:
        sample: Its ``ground_truth`` is compared as text.

    Returns:
        0 or 1.

    Raises:
        ValueError: If there is no ground truth to compare a response with.
    """
    response = sample.response.strip()
    if sample.is_truncated or not response:
        return 0.0
    truth = "" if sample.ground_truth is None else str(sample.ground_truth).strip()
    if not truth:
        raise ValueError(f"`ground_truth` must be a text for the reward `exact_match`, got {sample.ground_truth!r}.")
    return float(response == truth)
