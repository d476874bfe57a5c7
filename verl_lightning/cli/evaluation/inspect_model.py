"""A policy as a model of inspect's, and the scores of its tasks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from inspect_ai import eval as run_tasks
from inspect_ai.model import ChatMessage, GenerateConfig, ModelAPI, ModelOutput, ModelUsage, get_model, modelapi

from verl_lightning.cli.evaluation.command import EvaluationOptions
from verl_lightning.cli.evaluation.policy import Policy, Score
from verl_lightning.faults import RunError
from verl_lightning.rollout.base import SamplingConfig

MAX_TOKENS = 512
"""Longest response, in tokens, where a task does not say."""


@modelapi(name="verl_lightning")
class PolicyModel(ModelAPI):  # type: ignore[misc]  # mypy does not see inspect
    """A policy that inspect asks through the run's engine.

    Args:
        model_name: Name in inspect's logs.
        policy: The policy.
        of_inspect: Other arguments of inspect's, which are for models elsewhere.
    """

    def __init__(self, model_name: str, *, policy: Policy, **of_inspect: Any) -> None:
        super().__init__(model_name, config=of_inspect.get("config", GenerateConfig()))
        self.policy = policy

    async def generate(self, input: list[ChatMessage], tools: Sequence[Any], tool_choice: Any, config: Any) -> Any:
        """Answers a conversation; see inspect's `ModelAPI`.

        Raises:
            ValueError: If there are tools.
        """
        del tool_choice
        if tools:
            raise ValueError("`verl-fit evaluate --inspect` runs tasks without tools, but this one has some.")
        messages = [{"role": message.role, "content": message.text} for message in input]
        text = self.policy.with_template(messages, add_generation_prompt=True)
        ids = self.policy.tokenizer(text, add_special_tokens=False)["input_ids"]
        sampling = SamplingConfig(
            max_new_tokens=config.max_tokens or MAX_TOKENS,
            temperature=0.0 if config.temperature is None else config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=config.top_k or 0,
        )
        answer = await self.policy.respond(ids, sampling, config.stop_seqs or ())
        reason = "max_tokens" if answer.is_truncated else "stop"
        output = ModelOutput.from_content(self.model_name, answer.text, stop_reason=reason)
        total = len(ids) + answer.num_tokens
        output.usage = ModelUsage(input_tokens=len(ids), output_tokens=answer.num_tokens, total_tokens=total)
        return output


def evaluate(policy: Policy, options: EvaluationOptions) -> list[Score]:
    """Runs tasks of inspect, whose own logs go to `logs/`, where `inspect view` shows them.

    Args:
        policy: Policy that answers.
        options: Options of the tasks.

    Raises:
        RunError: If a task has failed.
    """
    name = policy.module.policy_config.path
    model = get_model(f"verl_lightning/{name}", memoize=False, policy=policy)
    logs = run_tasks(options.inspect, model=model, limit=options.limit, display="plain")
    for log in logs:
        if log.status != "success":
            reason = log.error.message if log.error else log.status
            raise RunError(f"the task `{log.eval.task}` has ended without scores: {reason}")
    return [score for log in logs for score in scores_of(log)]


def scores_of(log: Any) -> Iterator[Score]:
    """Yields the numbers of a task's log."""
    for scorer in log.results.scores:
        error = scorer.metrics.get("stderr")
        for name, metric in scorer.metrics.items():
            if name != "stderr":
                value = float(metric.value)
                stderr = None if error is None or not math.isfinite(error.value) else float(error.value)
                yield Score(log.eval.task, f"{name} ({scorer.name})", value, stderr, log.results.completed_samples)
