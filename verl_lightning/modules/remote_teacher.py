"""A teacher behind an address: a vLLM server that answers as OpenAI's does, asked for its most probable tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from verl_lightning.faults import RunError
from verl_lightning.modules.teacher_config import TeacherConfig
from verl_lightning.needs import missing_for_remote_teacher
from verl_lightning.types import TokenBatch

Listed = Sequence[Mapping[str, Mapping[str, float]] | None]
"""Tokens of each position of a prompt, by number, with their ``logprob``; None where the server says nothing."""


class RemoteTeacher:
    """Asks a server for the most probable tokens in the place of each response token.

    The tokens go as a prompt, of which ``/v1/completions`` of vLLM tells ``prompt_logprobs``, at temperature 1.

    Args:
        config: Options with the server's address.

    Raises:
        ValueError: If the key of the server is asked for and not there.
    """

    def __init__(self, config: TeacherConfig) -> None:
        self._config = config
        self._key = "none" if config.api_key is None else os.environ.get(config.api_key, "")
        if not self._key:
            raise ValueError(
                f"`model.teacher.api_key` names the environment variable `{config.api_key}`, which is not set."
            )

    @cached_property
    def _client(self) -> Any:
        if (complaint := missing_for_remote_teacher()) is not None:
            raise ValueError(complaint)
        import openai  # late: models that teach need none

        return openai.OpenAI(base_url=self._config.base_url, api_key=self._key)

    def top_log_probs(
        self, batch: TokenBatch
    ) -> tuple[Int[Tensor, "batch response listed"], Float[Tensor, "batch response listed"]]:
        """Returns the tokens that the server lists for each response token, and their log-probs, on the host.

        Args:
            batch: Sequences at temperature 1.

        Raises:
            RunError: If the server refuses or does not list tokens.
            ValueError: If the temperature is another.
        """
        if batch.temperature != 1:
            raise ValueError(
                f"`rollout.sampling.temperature` is {batch.temperature}, but `model.teacher.base_url` tells"
                " probabilities at temperature 1 only. Sample at 1, or use a teacher at `model.teacher.path`."
            )
        assert self._config.top_k is not None
        is_real = batch.attention_mask.cpu()
        tokens = [ids[mask].tolist() for ids, mask in zip(batch.input_ids.cpu(), is_real, strict=True)]
        with ThreadPoolExecutor(self._config.max_concurrency) as pool:
            answers = list(pool.map(self._ask, tokens))
        shape = (*batch.response_mask.shape, self._config.top_k)
        ids, log_probs = torch.zeros(shape, dtype=torch.long), torch.full(shape, -torch.inf)
        place = is_real.cumsum(-1)[:, -shape[1] :] - 1  # of each token among the real ones
        for row, column in batch.response_mask.cpu().nonzero().tolist():
            listed = answers[row][int(place[row, column])]
            for rank, (token, log_prob) in enumerate(_most_probable(listed, shape[2])):
                ids[row, column, rank], log_probs[row, column, rank] = token, log_prob
        return ids, log_probs

    def _ask(self, tokens: list[int]) -> Listed:
        import openai

        config = self._config
        try:
            answer = self._client.completions.create(
                model=config.served_model, prompt=tokens, max_tokens=1, extra_body={"prompt_logprobs": config.top_k}
            )
        except openai.OpenAIError as error:
            raise RunError(f"the teacher at `model.teacher.base_url` ({config.base_url}) failed: {error}") from error
        listed: Listed | None = (answer.choices[0].model_extra or {}).get("prompt_logprobs")
        if listed is None or len(listed) != len(tokens):
            raise RunError(
                f"the server at `model.teacher.base_url` ({config.base_url}) lists no tokens for its prompt"
                " (`prompt_logprobs`), as vLLM does. Use a vLLM server."
            )
        return listed


def _most_probable(listed: Mapping[str, Mapping[str, float]] | None, top_k: int) -> list[tuple[int, float]]:
    """Tokens and log-probs of a position; vLLM adds the token that is there to the most probable ones."""
    found = [(int(token), float(entry["logprob"])) for token, entry in (listed or {}).items()]
    return sorted(found, key=lambda pair: -pair[1])[:top_k]
