"""The reward for responses that must be the answer and nothing else."""

from __future__ import annotations

from verl_lightning.rewards.base import RewardSample


def exact_match(sample: RewardSample) -> float:
    """1 if the response is the ground truth, up to white space around it, else 0.

    A truncated response never matches: the policy had not finished.

    Args:
        sample: Its ``ground_truth`` is compared as text.

    Returns:
        0 or 1.
    """
    return float(not sample.is_truncated and sample.response.strip() == str(sample.ground_truth).strip())
