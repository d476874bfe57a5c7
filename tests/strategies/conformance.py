"""What every strategy must do: scenarios to run under it, whose results must equal those of one process under `auto`.

A scenario is a function of a `Bench`; it is run on every rank and returns numbers and tensors that are equal on all of
them; `test_conformance.py` compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.runs import (
    Recorder,
    make_chats,
    make_dpo,
    make_model_config,
    make_pairs,
    make_ppo,
    make_prompts,
    make_reward,
    make_rollout,
    make_sft,
    make_trainer,
)
from tests.strategies.probes import LengthProbe, measure
from tests.tiny import tiny_tokenizer, write_pair_file, write_prompt_file, write_tiny_folder, write_uneven_chat_file
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.algorithms.losses.ppo_clip import PPOClip
from verl_lightning.algorithms.preferences.kto import KTO
from verl_lightning.models.config import LoraConfig
from verl_lightning.modules import DPOModule, PPOModule, RewardModule
from verl_lightning.modules.micro_batches import split_micro_batches
from verl_lightning.modules.objectives import Normalizer, PolicyObjective
from verl_lightning.modules.ppo_config import CriticConfig, KLConfig, UpdateConfig
from verl_lightning.modules.teacher_config import TeacherConfig
from verl_lightning.strategies import STRATEGIES
from verl_lightning.types import Experience, Rollout

Results = dict[str, Any]
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOSSES = (
    "train/loss",
    "rewards/margins",
    "logps/chosen",
    "kl",
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/distillation_loss",
    "actor/entropy",
    "actor/router_replay/changed_routes",
    "critic/vf_loss",
    "critic/score/mean",
)
NORMS = ("train/grad_norm", "actor/grad_norm", "critic/grad_norm")
COUNTS = (
    "train/global_tokens",
    "train/global_examples",
    "actor/skipped_updates",
    "train/empty_batches",
    "train/excluded_sequences",
)
COUNTS += ("reward/errors", "training/global_step", "perf/total_num_tokens", "train/frac_zero_std")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where scenarios run."""

    strategy: str
    """Ours by name, or `auto`."""

    devices: int
    """Processes; 1, 2 or 4."""

    folder: Path
    """Holds the model and the data; see `write_inputs`."""

    options: dict[str, Any] = field(default_factory=dict)
    """Of the strategy."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Of the trainer."""

    def fit(self, module: LightningModule, *callbacks: Callback, **options: Any) -> Results:
        """Two steps, the second from what the first has left: losses, norms, counts, responses and weights."""
        is_ppo = isinstance(module, PPOModule)
        recorder, weights, responses = Recorder(), WeightChange(), Responses()
        ours = [make_rollout(), responses] if is_ppo else []
        # As `verl-fit` does: Lightning refuses the name `fsdp` on CPUs, which is its FSDP1's.
        strategy = STRATEGIES[self.strategy](**self.options) if self.strategy in STRATEGIES else self.strategy
        settings = {"strategy": strategy, "devices": self.devices, "max_steps": 2} | self.settings | options
        trainer = make_trainer(self.folder, *ours, recorder, weights, *callbacks, **settings)
        per_rank = 8 // self.replicas // trainer.accumulate_grad_batches
        data = make_prompts(self.folder / "prompts.jsonl") if is_ppo else self.chats(per_rank)
        if isinstance(module, DPOModule | RewardModule):
            data = make_pairs(self.folder / "pairs.jsonl", batch_size=per_rank, max_length=32)
        trainer.fit(module, datamodule=data)
        series = {
            kind: {name: [step.get(name) for step in recorder.steps] for name in names}
            for kind, names in {"losses": LOSSES, "norms": NORMS, "counts": COUNTS}.items()
        }
        return series | {"weight_change": weights.change(), "responses": responses.by_step}

    @property
    def replicas(self) -> int:
        """Ranks that see different data."""
        kinds = ("tensor", "pipeline", "context", "sequence")
        return self.devices // math.prod(self.options.get(f"{kind}_parallel_size", 1) for kind in kinds)

    def chats(self, per_rank: int) -> Any:
        """Chats of unequal lengths."""
        return make_chats(self.folder / "chats.jsonl", batch_size=per_rank)

    def model(self, **changes: Any) -> Any:
        """The tiny model."""
        return make_model_config(self.folder / "model", **changes)

    def ppo(self, **changes: Any) -> Any:
        """A PPO module in which micro-batches divide nothing evenly."""
        parts = {"actor": self.model(), "update": UpdateConfig(mini_batch_size=2, micro_batch_size=3)}
        return make_ppo(self.folder / "model", **parts | changes)


def write_inputs(folder: Path) -> None:
    """The model and the data of all scenarios."""
    write_tiny_folder(folder / "model")
    write_tiny_folder(folder / "teacher", seed=7, hidden_size=48)
    expert_model().save_pretrained(folder / "experts")
    tiny_tokenizer().save_pretrained(folder / "experts")
    write_prompt_file(folder / "prompts.jsonl")
    write_uneven_chat_file(folder / "chats.jsonl")
    write_pair_file(folder / "pairs.jsonl")


def expert_model() -> Qwen3MoeForCausalLM:
    """A mixture of four experts, of which each token meets two, for the tiny tokenizer."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3MoeForCausalLM(config)


class WeightChange(Callback):
    """How the policy's weights moved, by Hugging Face name, from start to end and in each step."""

    def __init__(self) -> None:
        self.snapshots: list[dict[str, Tensor]] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._take(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        self._take(pl_module)

    def change(self) -> list[dict[str, Tensor]]:
        """Of each step."""
        pairs = zip(self.snapshots, self.snapshots[1:], strict=False)
        return [{name: after[name] - before[name] for name in before} for before, after in pairs]

    def _take(self, pl_module: Any) -> None:
        weights = pl_module.contract.named_weights(pl_module.policy)
        self.snapshots.append({name: weight.float().cpu().clone() for name, weight in weights})


class Responses(Callback):
    """The sampled tokens of each step by row of the data; must come after the rollout callback."""

    def __init__(self) -> None:
        self.by_step: list[dict[int, list[list[int]]]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        rollout, rows = batch.rollout, batch.row_index.tolist()
        own: dict[int, list[list[int]]] = {row: [] for row in rows}
        for prompt, tokens, mask in zip(
            rollout.prompt_index.tolist(), rollout.response_ids, rollout.response_mask, strict=True
        ):
            own[rows[prompt]].append(tokens[mask].tolist())
        ranks = pl_module.contract.gather_over_data_parallel(own)
        self.by_step.append({row: tokens for part in ranks for row, tokens in sorted(part.items())})


def grpo_with_kl_and_entropy(bench: Bench) -> Results:
    """Group advantages, a KL loss and an entropy bonus."""
    update = UpdateConfig(mini_batch_size=2, micro_batch_size=3, entropy_coef=0.01)
    return bench.fit(bench.ppo(kl=KLConfig(coef=0.1), update=update))


def grpo_with_router_replay(bench: Bench) -> Results:
    """A mixture of experts, two of whose three updates replay routes that they would not choose."""
    update = UpdateConfig(mini_batch_size=2, micro_batch_size=3, epochs=2, router_replay="R2")
    actor = make_model_config(bench.folder / "experts", lr=1e-2)
    return bench.fit(bench.ppo(actor=actor, update=update))


def gae_with_own_critic(bench: Bench) -> Results:
    """Two models and two optimizers; advantages whitened over all ranks."""
    update = UpdateConfig(mini_batch_size=2, micro_batch_size=3, epochs=2)
    return bench.fit(bench.ppo(advantage=GAE(), critic=CriticConfig(model=bench.model()), update=update))


def gae_with_shared_trunk(bench: Bench) -> Results:
    """A value head on the actor."""
    return bench.fit(bench.ppo(advantage=GAE(), critic=CriticConfig(shared_coef=0.5)))


def lora(bench: Bench) -> Results:
    """Adapters, and the base weights as the reference."""
    return bench.fit(bench.ppo(actor=bench.model(lora=LoraConfig(rank=4)), kl=KLConfig(coef=0.1)))


def sft(bench: Bench) -> Results:
    """Eight chats a step."""
    return bench.fit(make_sft(bench.folder / "model", actor=bench.model()))


def sft_accumulated(bench: Bench) -> Results:
    """The same eight chats a step, in two batches."""
    return bench.fit(make_sft(bench.folder / "model", actor=bench.model()), accumulate_grad_batches=2)


def packed_within_a_budget(bench: Bench) -> Results:
    """GAE with a critic on packed sequences; ranks differ in what they need and make as many micro-batches."""
    update = UpdateConfig(mini_batch_size=2, epochs=2, max_tokens_per_micro_batch=40)
    model = bench.model(packing="always")
    return bench.fit(bench.ppo(actor=model, advantage=GAE(), critic=CriticConfig(model=model), update=update))


def sft_packed_within_a_budget(bench: Bench) -> Results:
    """Eight chats a step, packed, in several micro-batches."""
    module = make_sft(bench.folder / "model", actor=bench.model(packing="always"), max_tokens_per_micro_batch=64)
    return bench.fit(module, accumulate_grad_batches=2)


def dpo_accumulated(bench: Bench) -> Results:
    """Eight pairs a step, in two batches of several micro-batches."""
    module = make_dpo(bench.folder / "model", actor=bench.model(), max_tokens_per_micro_batch=96)
    return bench.fit(module, accumulate_grad_batches=2)


def kto_with_adapters(bench: Bench) -> Results:
    """Eight responses a step, whose KL is that of all ranks; the base weights as the reference."""
    actor = bench.model(lora=LoraConfig(rank=4))
    return bench.fit(make_dpo(bench.folder / "model", actor=actor, loss=KTO()))


def reward_model(bench: Bench) -> Results:
    """Eight pairs a step, packed, in several micro-batches; the head starts at zero."""
    actor = bench.model(packing="always")
    return bench.fit(RewardModule(actor, center_rewards_coefficient=0.01, max_tokens_per_micro_batch=96))


def taught_beside_rewards(bench: Bench) -> Results:
    """Two teachers, one of which has no prompts, and rewards; packed, in several micro-batches."""
    path = str(bench.folder / "teacher")
    update = UpdateConfig(mini_batch_size=2, max_tokens_per_micro_batch=40)
    teacher = TeacherConfig(path=path, by_source={"sort4": path}, beta=0.5, aggregation="seq-mean-token-mean")
    return bench.fit(bench.ppo(actor=bench.model(packing="always"), teacher=teacher, update=update))


def one_rank_without_rewards(bench: Bench) -> Results:
    """Every other row has no reward: all rows of rank 0 if there are two."""
    return bench.fit(bench.ppo(reward=make_reward("fails_on_even_rows", max_error_share=1.0)))


def one_rank_without_rewards_for_its_critic(bench: Bench) -> Results:
    """The same with a critic, whose advantages are whitened over all ranks."""
    reward = make_reward("fails_on_even_rows", max_error_share=1.0)
    return bench.fit(bench.ppo(advantage=GAE(), critic=CriticConfig(model=bench.model()), reward=reward))


class EmptyResponses(Callback):
    """Takes every token from the responses."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        mask = torch.zeros_like(batch.rollout.response_mask)
        batch.rollout = replace(batch.rollout, response_mask=mask)


def nothing_to_train_on(bench: Bench) -> Results:
    """No response has a token."""
    return bench.fit(bench.ppo(), EmptyResponses())


class ExplodingLoss(PPOClip):
    """Infinite in the second iteration on rank 0."""

    module: PPOModule

    def __call__(self, log_probs: Tensor, experience: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        losses, metrics = super().__call__(log_probs, experience)
        is_bad = self.module.trainer.global_step == 1 and self.module.contract.data_parallel_rank == 0
        return losses * (float("inf") if is_bad else 1.0), dict(metrics)


def infinite_gradient(bench: Bench) -> Results:
    """One rank's gradient explodes in the second iteration."""
    loss = ExplodingLoss()
    loss.module = module = bench.ppo(policy_loss=loss)
    return bench.fit(module, max_steps=3)


class GradientProbe(Callback):
    """Measures the gradient of the first step's responses in many ways; must come after the rollout callback."""

    def __init__(self) -> None:
        self.measured: dict[str, tuple[float, float]] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > 0:
            return
        contract = pl_module.contract
        sizes = {"16x1": 1, "4x4": 4}
        if contract.data_parallel_size > 1:
            sizes["uneven"] = 1 if contract.data_parallel_rank == 0 else 8
        for aggregation in AGGREGATIONS:
            for cut, size in sizes.items():
                self.measured[f"{aggregation}, {cut}"] = loss_and_norm(pl_module, batch.rollout, aggregation, size)


def loss_and_norm(module: PPOModule, rollout: Rollout, aggregation: Any, size: int) -> tuple[float, float]:
    """Loss and gradient norm of one mini-batch with all responses of all ranks."""
    mask, reduce = rollout.response_mask, module.contract.sum_over_data_parallel
    counts = reduce(torch.stack([mask.sum(), mask.any(-1).sum()]))
    normalizer = Normalizer(
        aggregation=aggregation, num_tokens=counts[0], num_sequences=counts[1], max_response_length=6
    )
    objective = PolicyObjective(
        policy_loss=PPOClip(), normalizer=normalizer, kl=None, kl_coef=0.0, entropy_coef=0.3, is_on_policy=False
    )

    return measure(module, split_micro_batches(made_up_experience(rollout), size), objective)


def made_up_experience(rollout: Rollout) -> Experience:
    """Advantages that depend on nothing but the tokens, and ratios away from 1."""
    return Experience(
        input_ids=rollout.input_ids,
        attention_mask=rollout.attention_mask,
        response_mask=rollout.response_mask,
        rollout_log_probs=rollout.rollout_log_probs,
        old_log_probs=rollout.rollout_log_probs + 0.1,
        advantages=rollout.response_ids.float().sin(),
    )


def gradients_of_any_cut(bench: Bench) -> Results:
    """The gradient of 16 responses in micro-batches of many sizes, for every aggregation, and the steps after it."""
    probe = GradientProbe()
    return bench.fit(bench.ppo(), probe) | {"measured": probe.measured}


def lengths_of_any_kind(bench: Bench) -> Results:
    """Micro-batches of a token budget for sampled lengths that no two ranks share equally; none may hang."""
    probe = LengthProbe()
    return bench.fit(bench.ppo(actor=bench.model(packing="always")), probe) | {"measured": probe.measured}


def whole_weights(bench: Bench) -> Results:
    """The weights as the rollout engine and checkpoints get them, before training."""
    taken: dict[str, dict[str, Tensor]] = {}
    for name, lora_config in {"full": None, "lora": LoraConfig(rank=4)}.items():
        weights = WeightChange()
        bench.fit(bench.ppo(actor=bench.model(lora=lora_config)), weights, max_steps=1)
        taken[name] = weights.snapshots[0]
    return {"named_weights": taken}


SCENARIOS: dict[str, Callable[[Bench], Results]] = {
    scenario.__name__: scenario
    for scenario in (
        grpo_with_kl_and_entropy,
        grpo_with_router_replay,
        gae_with_own_critic,
        gae_with_shared_trunk,
        lora,
        sft,
        sft_accumulated,
        packed_within_a_budget,
        sft_packed_within_a_budget,
        dpo_accumulated,
        kto_with_adapters,
        reward_model,
        taught_beside_rewards,
        one_rank_without_rewards,
        one_rank_without_rewards_for_its_critic,
        nothing_to_train_on,
        infinite_gradient,
        gradients_of_any_cut,
        lengths_of_any_kind,
        whole_weights,
    )
}


def run_scenarios(bench: Bench, names: Sequence[str] | None = None) -> Iterator[tuple[str, Results]]:
    """All of them or those of these names, each from the same seed."""
    for name in SCENARIOS if names is None else names:
        seed_everything(0, verbose=False)
        yield name, SCENARIOS[name](bench)
