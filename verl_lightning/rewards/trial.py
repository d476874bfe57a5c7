"""A trial of the reward function on rows of the data, before models are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_lightning.rewards.base import ANY_RESPONSE
from verl_lightning.rewards.config import RewardConfig
from verl_lightning.rewards.scoring import RewardResults


def trial_responses(ground_truth: Any) -> list[str]:
    """Returns two responses that any function should judge: the right answer, where it is text, and a wrong one."""
    is_text = isinstance(ground_truth, str | int | float) and not isinstance(ground_truth, bool)
    return [str(ground_truth) if is_text else "", ANY_RESPONSE]


def trial_warning(
    config: RewardConfig, data_source: str, responses: Sequence[str], results: RewardResults
) -> str | None:
    """Returns a warning if the function failed on each response of a trial, or returned None for each; else None.

    Args:
        config: The function and its limits.
        data_source: Data source of the row that was tried.
        responses: Responses that were judged.
        results: Results of the trial.

    Raises:
        ValueError: If the function has a fault that no response is to blame for.
    """
    tried = (
        f"The reward {config.label} was tried on the first row of `{data_source}`, with the responses"
        f" {' and '.join(repr(response[:80]) for response in responses)}"
    )
    if results.first_mistake is not None:
        raise ValueError(f"{tried}, and failed in a way that no response is to blame for:\n{results.first_mistake}")
    if results.num_errors + results.num_timeouts == len(responses):
        return (
            f"{tried}, and failed on each. Sampled responses on which it fails are left out, and the run stops if they"
            f" are more than `max_error_share: {config.max_error_share:g}` of a batch. The first failure:\n"
            f"{results.first_traceback}"
        )
    if results.num_none == len(responses):
        return f"{tried}, and returned None for each, which leaves a response out. Does it lack a `return`?"
    return None


def trial_note(config: RewardConfig, results: RewardResults) -> str | None:
    """Returns a note on the values of a trial that are no numbers, and so are not logged; None if there are none."""
    if not results.unlogged:
        return None
    names = ", ".join(f"`{name}`" for name in results.unlogged)
    return f"The reward {config.label} returns values that are no numbers and are not logged: {names}."
