"""A module that is judged by sampled responses: the rollout it needs, the judge, validation by sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from verl_lightning.data.own_rows import prompt_batch
from verl_lightning.data.validation_sets import ValidationSet
from verl_lightning.faults import RunError, told_of
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.library_errors import model_must_be_at
from verl_lightning.models.pretrained import read_config
from verl_lightning.models.size import ModelRole
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.dynamic_sampling import DynamicSampling
from verl_lightning.modules.judge import Judge, RewardResult, response_texts, unjudged
from verl_lightning.modules.model_rewards import ModelRewards, check_reward_model, own_device, reward_role
from verl_lightning.modules.ppo_config import ValidationConfig
from verl_lightning.modules.resume_checks import Identity, reward_identities
from verl_lightning.modules.validation import ScoredResponse, scored_responses, validation_metrics
from verl_lightning.rewards.config import RewardConfig
from verl_lightning.rewards.loading import OF_ENVIRONMENTS
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.completions import Listener
from verl_lightning.telemetry.phases import METRICS, SAVE_CHECKPOINT
from verl_lightning.types import PromptBatch, Rollout


@runtime_checkable
class RolloutSource(Protocol):
    """A callback that sets ``batch.rollout``, with its sampling settings."""

    sampling: SamplingConfig
    val_sampling: SamplingConfig


@runtime_checkable
class PromptSource(Protocol):
    """A data module of prompts, with its sizes and rows to show before a run begins."""

    prompts_per_step: int
    max_prompt_length: int
    enable_thinking: bool | None

    def first_rows(self) -> list[dict[str, Any]]:
        """The first row of each data source."""


def check_length(name: str, longest: int, sampling: SamplingConfig, limit: int) -> None:
    """Refuses sequences that are longer than the model reads.

    Args:
        name: Name of the sampling settings, a key of ``rollout``.
        longest: Length of the longest prompt, in tokens.
        sampling: Settings by which prompts are answered.
        limit: Most tokens that the model reads.

    Raises:
        ValueError: With what to shorten.
    """
    if (total := longest + sampling.max_new_tokens) > limit:
        raise ValueError(
            f"`data.max_prompt_length` and `rollout.{name}.max_new_tokens` add up to {total} tokens, but the"
            f" model reads at most {limit}. Shorten one of them."
        )


def given_rollout(rollout: Rollout | None, name: str) -> Rollout:
    """The responses that the rollout callback added to a batch as ``name``.

    Raises:
        RunError: If there are none.
    """
    if rollout is None:
        raise RunError(f"the batch holds no `{name}`: the rollout callback must set `batch.{name}` before each step.")
    return rollout


class SamplingModule(PostTrainingModule):
    """A policy that is judged by its sampled responses.

    Args:
        policy_config: The policy's model.
        reward: Reward function that judges responses, and its limits; None judges nothing.
        validation: Metrics of validation prompts.
    """

    dynamic_sampling: DynamicSampling | None = None
    """Choice of the groups that an iteration learns from; None takes all."""

    def __init__(self, policy_config: ModelConfig, reward: RewardConfig | None, validation: ValidationConfig) -> None:
        super().__init__(policy_config)
        self.reward_config = reward
        self.validation = validation
        self._judge: Judge | None = None
        self._model_rewards: ModelRewards | None = None
        self._scored: list[ScoredResponse] = []
        self._first_failure: str | None = None  # of those that were scored

    @property
    @override
    def validation_metrics(self) -> set[str] | None:
        parts = [f"reward/{part.label}" for part in self.reward_config.functions] if self.reward_config else []
        parts += ["reward/model"] if self.reward_roles else []
        names = ["reward", "response_length", "unscored_responses", *parts]
        most = max(sampling.num_samples for sampling in self.val_samplings)
        counts = {"val": most} | {
            f"val/{name}": sampling.num_samples
            for name, sampling in zip(self._val_sets, self.val_samplings, strict=False)
        }
        passes = {
            f"{prefix}/pass@{k}" for prefix, count in counts.items() for k in self.validation.pass_k if k <= count
        }
        return passes | {f"{prefix}/{name}" for prefix in counts for name in names}

    @property
    def _val_sets(self) -> dict[str, ValidationSet]:
        """Validation sets by name; empty where there is one without a name."""
        return getattr(self.prompt_source, "val_sets", {})

    @property
    def val_samplings(self) -> list[SamplingConfig]:
        """Settings by which each validation set is sampled, in the order of its loader."""
        plain = self.rollout_source.val_sampling
        return [
            replace(
                plain,
                num_samples=plain.num_samples if each.num_samples is None else each.num_samples,
                temperature=plain.temperature if each.temperature is None else each.temperature,
            )
            for each in self._val_sets.values()
        ] or [plain]

    @property
    def max_tokens(self) -> int | None:
        """Longest prompt and response together, in tokens; None where the data module does not say."""
        source = self.prompt_source
        return None if source is None else source.max_prompt_length + self.rollout_source.sampling.max_new_tokens

    @property
    def prompt_source(self) -> PromptSource | None:
        """The run's data module, where it is one of prompts; None where prompts come from loaders alone."""
        data = getattr(self.trainer, "datamodule", None)  # Lightning sets it only where there is one
        return data if isinstance(data, PromptSource) else None

    @property
    def needs_truth(self) -> bool:
        """True if a reward function judges responses, which compares them with a row's ``ground_truth``."""
        return self.reward_config is not None and bool(self.reward_config.parts) and not self._leaves_rewards

    @property
    def _leaves_rewards(self) -> bool:
        """True if environments alone give rewards."""
        return self.reward_config is not None and self.reward_config.function == OF_ENVIRONMENTS

    @override
    def image_obstacle(self) -> str | None:
        if self.reward_roles:
            return f"`{self.reward_roles[0].key}` judges text alone so far. Judge by a function."
        obstacle = getattr(self.rollout_source, "image_obstacle", None)
        return super().image_obstacle() or (None if obstacle is None else obstacle())

    @property
    def needs_greedy_rollout(self) -> bool:
        """True if the module compares with a greedy response to each prompt."""
        return False

    @override
    def find_identities(self) -> dict[str, Identity]:
        ends = ", ".join(map(str, self.eos_token_ids))
        end_tokens = Identity(key="model.actor.path", what="the list of end tokens", shown=ends, digest=ends)
        return {
            **super().find_identities(),
            **(reward_identities(self.reward_config) if self.reward_config else {}),
            "end_tokens": end_tokens,
        }

    @override
    def told_settings(self) -> dict[str, Any]:
        if (config := self.reward_config) is None:
            return super().told_settings()
        reward: dict[str, Any] = {"model.reward.function": config.function and str(config.function)}
        if config.function is None:
            reward = {"model.reward.functions": {part.label: part.weight for part in config.functions}}
        return super().told_settings() | reward

    @property
    def reward_roles(self) -> list[ModelRole]:
        """The reward model, where there is one."""
        config = None if self.reward_config is None else self.reward_config.model
        return [] if config is None else [reward_role(config)]

    def make_reward_model(self) -> None:
        """Makes the reward model, where there is one. Collective; called in ``configure_model``."""
        config = None if self.reward_config is None else self.reward_config.model
        if config is None:
            return
        role = reward_role(config)
        with told_of(role.key):
            check_reward_model(config, self.tokenizer, self.contract)
            place = own_device(config, self.trainer.local_rank)
            model = self.contract.make_model(role.config, role.head, trainable=False)
        model.disable_dropout()
        if place is not None:
            model.to(place)
        self._model_rewards = ModelRewards(config, model, self.tokenizer, self.contract)

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        source = self.rollout_source
        most = max(sampling.num_samples for sampling in self.val_samplings)
        if (largest := max(self.validation.pass_k, default=1)) > most:
            raise ValueError(
                f"`model.validation.pass_k` asks for pass@{largest}, but `rollout.val_sampling.num_samples` is"
                f" {most}. Sample at least {largest} responses, or ask for a smaller k."
            )
        self._check_lengths(stage)
        if self._leaves_rewards and getattr(source, "environment", None) is None:
            raise MisconfigurationException(
                f"`model.reward: {OF_ENVIRONMENTS}` leaves rewards to environments, but there is none. Set"
                " `rollout.environment`, or name another reward function."
            )
        if self.reward_config is None and getattr(source, "environment", None) is not None:
            raise MisconfigurationException(
                f"`model.reward: null` would drop what `rollout.environment` gives. Set `model.reward:"
                f" {OF_ENVIRONMENTS}`, or take the environment out."
            )
        if stage == "predict" or self.reward_config is None:  # whose rows may lack what rewards need
            return
        self._judge = Judge(self.reward_config, self.tokenizer)
        if self.contract.model_parallel_rank == 0:
            with told_of("model.reward"):
                self._judge.start()
                self._judge.try_out(self._rows_to_try())

    def _check_lengths(self, stage: str) -> None:
        """Refuses responses that are longer than the model reads, before it is built."""
        source = self.prompt_source
        with told_of("model.actor"), model_must_be_at(self.policy_config.path):
            config = read_config(self.policy_config.path).get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        if source is None or limit is None:
            return
        longest = source.max_prompt_length
        if stage == "fit":
            check_length("sampling", longest, self.rollout_source.sampling, limit)
        if stage != "fit" or self.trainer.enable_validation:
            check_length("val_sampling", longest, self.rollout_source.val_sampling, limit)

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> PromptBatch:
        if isinstance(batch, PromptBatch):
            return batch
        needs_truth = self.needs_truth and not self.trainer.predicting
        made = prompt_batch(batch, self.tokenizer, needs_truth=needs_truth, processor=self.processor)
        self.check_images(made.images)
        return made

    @override
    def predict_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> list[dict[str, Any]]:
        """Returns the batch's responses, each with its ``prompt``, its row and whether it ``is_truncated``."""
        rollout = given_rollout(batch.rollout, "rollout")
        texts = response_texts(rollout, self.tokenizer, skip_special_tokens=True)
        found = zip(rollout.prompt_index.tolist(), texts, rollout.is_truncated.tolist(), strict=True)
        return [
            {"prompt": batch.rows[row]["prompt"], "response": text, "is_truncated": is_cut, "row": batch.rows[row]}
            for row, text, is_cut in found
            if not batch.is_duplicate[row]
        ]

    @override
    def validation_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        return self._evaluate(batch, dataloader_idx)

    @override
    def on_validation_epoch_start(self) -> None:
        self._scored, self._first_failure = [], None

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    @override
    def test_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        return self._evaluate(batch, dataloader_idx)

    @override
    def on_test_epoch_start(self) -> None:
        self._scored, self._first_failure = [], None

    @override
    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    @override
    def teardown(self, stage: str) -> None:
        if self._judge is not None:
            self._judge.stop()
            self._judge = None

    @property
    def judge(self) -> Judge:
        """Judge of responses, from ``setup`` to ``teardown``; runs on the first of the ranks that see the same data."""
        assert self._judge is not None
        return self._judge

    @property
    def rollout_source(self) -> RolloutSource:
        """The callback that samples responses.

        Raises:
            MisconfigurationException: If there is none.
        """
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RolloutSource):
                return callback
        raise MisconfigurationException(
            f"`{type(self).__name__}` learns from sampled responses, but no callback samples any."
            " Add one: `rollout: HFRollout` in the config, or `Trainer(callbacks=[HFRollout(...)])`."
        )

    def begin_judging(self, batch: PromptBatch, num_samples: int) -> Listener | None:
        """Begins to score responses while others are still sampled; `judged` waits for the rest.

        Args:
            batch: Prompts that are answered.
            num_samples: Number of responses to each.

        Returns:
            Listener to tell of each response as soon as it is finished; None where they are scored all at once: where
            ranks share the data, or rewards come from Ray; or where no function gives any.
        """
        if self.reward_config is None or self.contract.model_parallel_size > 1:
            return None
        return self.judge.begin(batch.rows, num_samples)

    def judged(self, rollout: Rollout, rows: Sequence[dict[str, Any]]) -> RewardResult:
        """Scores responses with the reward function, once for all ranks that see the same data. Collective."""
        contract = self.contract
        if self.reward_config is None:
            return unjudged(rollout, self.tokenizer)
        own = self.judge.score(rollout, rows) if contract.model_parallel_rank == 0 else None
        if contract.model_parallel_size > 1:
            own = contract.gather_over_model_parallel(own and own.to(torch.device("cpu")))[0]
        assert own is not None
        result = own.to(rollout.input_ids.device)
        return result if self._model_rewards is None else self._model_rewards.added(result, rollout)

    def _rows_to_try(self) -> list[dict[str, Any]]:
        return [] if self.prompt_source is None else self.prompt_source.first_rows()

    def _evaluate(self, batch: PromptBatch, loader: int) -> dict[str, Any]:
        rollout = given_rollout(batch.rollout, "rollout")
        with self.phase("reward"):
            reward_result = self.judged(rollout, batch.rows)
        self._scored += scored_responses(batch, reward_result, loader)
        self._first_failure = self._first_failure or reward_result.first_failure
        return {"reward_result": reward_result}

    def _log_evaluation(self, stage: str) -> None:
        responses = [r for rank in self.contract.gather_over_data_parallel(self._scored) for r in rank]
        samplings = self.val_samplings if stage == "val" else [self.rollout_source.val_sampling]
        compute = partial(validation_metrics, config=self.validation, stage=stage, first_failure=self._first_failure)
        metrics = compute(responses, num_samples=samplings[0].num_samples)
        if self._val_sets and stage == "val":
            metrics = {name: value for name, value in metrics.items() if name.startswith("val/")}
            for index, (name, sampling) in enumerate(zip(self._val_sets, samplings, strict=True)):
                own = [response for response in responses if response.loader == index]
                found = compute(own, num_samples=sampling.num_samples)
                parts = ((key.partition("/"), value) for key, value in found.items())
                metrics |= {f"{kind}/{name}/{rest}": value for (kind, _, rest), value in parts}
        timings = self.take_timings()
        of_training = {name: timings.get(f"timing_s/{name}", 0.0) for name in (METRICS, SAVE_CHECKPOINT)}
        metrics["timing_s/testing"] = timings["timing_s/step"] - sum(of_training.values())
        if of_training[SAVE_CHECKPOINT]:
            metrics["timing_s/save_checkpoint"] = of_training[SAVE_CHECKPOINT]
        self.log(f"{stage}/reward", metrics.pop(f"{stage}/reward"), prog_bar=True, batch_size=1)
        self.log_dict(metrics, batch_size=1)
