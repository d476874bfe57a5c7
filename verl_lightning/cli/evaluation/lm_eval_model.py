"""A policy as a model of lm-eval's (0.4), and the scores of its tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from verl_lightning.cli.evaluation.command import EvaluationOptions
from verl_lightning.cli.evaluation.policy import Policy, Score
from verl_lightning.faults import closest
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.completions import wait_for


class PolicyModel(TemplateLM):  # type: ignore[misc]  # mypy does not see lm-eval
    """A policy that lm-eval asks; what it generates comes from the engine, log-probs come from the trainer's model.

    Args:
        policy: The policy.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.tokenizer = policy.tokenizer
        self.max_length = policy.max_length

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return self.policy.module.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """Token before a text that nothing precedes."""
        return self.eot_token_id if (begin := self.tokenizer.bos_token_id) is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm-eval keeps prompts in the template's form."""
        return self.policy.module.policy_config.path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Returns the tokens of a text; one in the chat template has its special tokens already."""
        begin = self.tokenizer.bos_token
        adds = not (begin and string.startswith(begin)) if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer(string, add_special_tokens=adds)["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns a conversation in the policy's chat template."""
        ending = {"add_generation_prompt": True} if add_generation_prompt else {"continue_final_message": True}
        return self.policy.with_template(chat_history, **ending)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the engine's responses; see lm-eval's `LM`."""
        del disable_tqdm

        async def respond() -> list[str]:
            asked = [self.policy.respond(self.tok_encode(text), *settings(given)) for text, given in arguments]
            return [answer.text for answer in await asyncio.gather(*asked)]

        arguments = [request.args for request in requests]
        return wait_for(respond())

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        del disable_tqdm
        pairs = [(context[-(self.max_length - len(words)) :], words) for _, context, words in requests]
        return list(zip(self.policy.scored(pairs), self.policy.are_greedy(pairs), strict=True))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-prob of whole texts, each token after as many before it as the model reads."""
        del disable_tqdm
        return [sum(self.policy.scored(self._windows(self.tok_encode(text)))) for (text,) in (r.args for r in requests)]

    def _windows(self, tokens: list[int]) -> list[tuple[list[int], list[int]]]:
        """Splits a text into parts, each after one token more than is needed to predict its first."""
        width = self.max_length - 1
        parts = [tokens[start : start + width] for start in range(0, len(tokens), width)]
        before = [self.prefix_token_id, *(part[-1] for part in parts[:-1])]
        return [([token], part) for token, part in zip(before, parts, strict=True)]


def settings(given: Any) -> tuple[SamplingConfig, list[str]]:
    """Returns the settings of a response as a task writes them, and the texts that end it."""
    known = normalize_gen_kwargs(dict(given))
    sampling = SamplingConfig(
        max_new_tokens=known["max_gen_toks"],
        temperature=float(known.get("temperature", 0.0)),
        top_p=float(known.get("top_p", 1.0)),
        top_k=int(known.get("top_k", 0)),
    )
    return sampling, known["until"]


def evaluate(policy: Policy, options: EvaluationOptions) -> list[Score]:
    """Runs tasks of lm-eval.

    Args:
        policy: Policy that answers.
        options: Options of the tasks.

    Raises:
        ValueError: If there is no task of a name.
    """
    manager = TaskManager(include_path=options.include_path)
    if unknown := [name for name in options.tasks if not manager.match_tasks([name])]:
        raise ValueError(
            f"`--tasks {unknown[0]}`: lm-eval has no such task.{closest(unknown[0], manager.all_tasks)} `lm_eval ls"
            " tasks` lists them; `--include_path` adds a folder of your own."
        )
    found = simple_evaluate(
        PolicyModel(policy),
        tasks=options.tasks,
        task_manager=manager,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        apply_chat_template=options.apply_chat_template,
        log_samples=False,
        bootstrap_iters=1000,
    )
    return list(scores_of(found))


def scores_of(found: Any) -> Any:
    """Yields the numbers that lm-eval has found."""
    for task, metrics in found["results"].items():
        samples = found["n-samples"].get(task, {}).get("effective", 0)
        for name, value in metrics.items():
            metric, _, kept = name.partition(",")
            if not isinstance(value, int | float) or metric.endswith("_stderr") or not kept:
                continue
            error = metrics.get(f"{metric}_stderr,{kept}")
            shown = metric if kept == "none" else f"{metric} ({kept})"
            yield Score(task, shown, float(value), error if isinstance(error, float) else None, samples)
