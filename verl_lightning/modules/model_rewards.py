"""Rewards of a reward model on the trainer's devices or beside them: of whole responses, or of each of their steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl_lightning.models.classifier import SCORE
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.scorer import TokenScorer
from verl_lightning.models.size import ModelRole
from verl_lightning.models.tokenizer import load_tokenizer
from verl_lightning.models.weight_files import stored_weight
from verl_lightning.modules.judge import RewardResult
from verl_lightning.modules.micro_batches import BatchSplitter
from verl_lightning.rewards.config import RewardModelConfig
from verl_lightning.strategies.base import PostTrainingStrategy
from verl_lightning.types import Rollout, TokenBatch

KEY = "model.reward.model"


class ModelRewards(NamedTuple):
    """A reward model, ready to judge."""

    config: RewardModelConfig
    """Options."""

    model: TokenScorer
    """The model."""

    tokenizer: PreTrainedTokenizerBase
    """Its tokenizer and the policy's."""

    contract: PostTrainingStrategy
    """Runs the model."""

    def added(self, result: RewardResult, rollout: Rollout) -> RewardResult:
        """Adds the model's rewards to those that responses have. Collective.

        Args:
            result: Rewards of functions and environments; zeros where there are none.
            rollout: The responses.
        """
        ends, last = self._ends(rollout)
        with self._awake():
            values = torch.where(ends | last, self._values(rollout, ends | last), 0.0)
        rewards = self.config.weight * values
        own = torch.where(last, 0.0, rewards)[:, 1:]  # that of the last token follows from the sum
        others = result.token_rewards
        return replace(
            result,
            rewards=result.rewards + rewards.sum(-1),
            components={**result.components, "model": values.sum(-1)},
            token_rewards=others if self.config.step is None else own if others is None else others + own,
        )

    def _ends(self, rollout: Rollout) -> tuple[Bool[Tensor, "batch positions"], Bool[Tensor, "batch positions"]]:
        """Positions whose value is a reward, counted from that before the response: ends of steps, and the last.

        As in transformers' sequence classification, padding tokens at the end are none of the sequence's.
        """
        width, ids = rollout.response_mask.shape[1], rollout.response_ids
        is_real = rollout.attention_mask[:, -width:] & (ids != self.tokenizer.pad_token_id)
        columns = torch.arange(1, width + 1, device=ids.device)
        count = torch.where(is_real, columns, 0).amax(-1, keepdim=True)
        last = torch.arange(width + 1, device=ids.device) == count
        if self.config.step is None:
            return torch.zeros_like(last), last
        texts = [self.tokenizer.convert_ids_to_tokens(row) for row in ids.tolist()]
        rows = [[self.config.step in self.tokenizer.convert_tokens_to_string([t]) for t in row] for row in texts]
        ends = torch.tensor(rows, device=ids.device) & is_real & rollout.response_mask
        return F.pad(ends, (1, 0)), last

    def _values(self, rollout: Rollout, is_asked: Bool[Tensor, "batch positions"]) -> Float[Tensor, "batch positions"]:
        """Values after the tokens that are asked for; a value is predicted before a token, so there is one more."""
        real = rollout.attention_mask
        first = real[:, : real.shape[1] - rollout.response_mask.shape[1]]
        count = real[:, first.shape[1] :].sum(-1, keepdim=True)
        batch = TokenBatch(
            input_ids=F.pad(rollout.input_ids, (0, 1), value=int(self.tokenizer.pad_token_id)),
            attention_mask=torch.cat([first, torch.arange(is_asked.shape[1], device=real.device) <= count], dim=1),
            response_mask=is_asked,
        )
        splitter = BatchSplitter(contract=self.contract, micro_batch_size=self.config.micro_batch_size, max_tokens=None)
        (split,) = splitter.split(self.model, [batch])
        parts = split.parts
        if self.config.devices:
            place = next(self.model.parameters()).device
            parts = [part.to(place) for part in parts]
        values = split.join(self.contract.forward(self.model, parts)).values
        assert values is not None
        return values.to(real.device)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Within it, the model is on the device; outside, with ``offload``, in the host's memory."""
        if self.config.offload:
            self.model.to(self.contract.root_device)
        try:
            yield
        finally:
            if self.config.offload:
                self.model.to("cpu")


def reward_role(config: RewardModelConfig) -> ModelRole:
    """The role of a reward model."""
    model = ModelConfig(path=config.path, dtype=config.dtype)
    return ModelRole("reward model", model, "value", trainable=False, key=KEY, is_elsewhere=bool(config.devices))


def own_device(config: RewardModelConfig, local_rank: int) -> torch.device | None:
    """Returns the device beside the trainer's on which a rank has its reward model; None for the trainer's own.

    Args:
        config: Options.
        local_rank: Number of the rank among those of its node.

    Raises:
        MisconfigurationException: If none is named for this rank, or it sees no such device.
    """
    if not config.devices:
        return None
    if local_rank >= len(config.devices):
        raise MisconfigurationException(
            f"`{KEY}.devices` names {len(config.devices)}, but this node has a training process with local rank"
            f" {local_rank}. Name one for each."
        )
    name = config.devices[local_rank]
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # the latter where torch has no such back end
        reason = str(error).partition("\n")[0]
        raise MisconfigurationException(f"`{KEY}.devices`: there is no device `{name}` ({reason}).") from error


def check_reward_model(
    config: RewardModelConfig, tokenizer: PreTrainedTokenizerBase, contract: PostTrainingStrategy
) -> None:
    """Refuses a model that gives no rewards or reads other tokens, before it is loaded.

    Args:
        config: Options.
        tokenizer: The policy's.
        contract: The strategy.

    Raises:
        MisconfigurationException: If the strategy can't do what is asked.
        ValueError: If the model does not fit.
    """
    moved = "offload" if config.offload else "devices" if config.devices else None
    if moved is not None and not contract.holds_whole_models:
        raise MisconfigurationException(
            f"`{KEY}.{moved}` moves a whole model, but this strategy spreads models over ranks. Leave it out."
        )
    score = stored_weight(config.path, SCORE)
    if score is None or score.shape[0] != 1:
        raise ValueError(
            f"`{KEY}.path: {config.path}` is no reward model: it holds no `{SCORE}` with one row. Give a folder of"
            " `AutoModelForSequenceClassification` with one label, as `RewardModule` exports it."
        )
    if load_tokenizer(config.path).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"`{KEY}.path: {config.path}` has another vocabulary than the policy, whose tokens it is to judge. Choose a"
            " reward model of the policy's family, or call yours from a reward function."
        )
