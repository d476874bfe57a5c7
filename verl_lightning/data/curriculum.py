"""Has kinds of prompts join the training one after another, as the policy masters them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_info
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from verl_lightning.data.loader import TrainLoader
from verl_lightning.data.mixture import CurriculumConfig, Mixture


class FollowCurriculum(Callback):
    """Counts how many responses to the newest kind of prompts pass, and has the next kind join.

    Args:
        loader: Training rows.
        mixture: Kinds of prompts of the loader.
        config: Rule by which kinds join.
    """

    def __init__(self, loader: TrainLoader, mixture: Mixture, config: CurriculumConfig) -> None:
        self._loader = loader
        self._mixture = mixture
        self._config = config
        self._counts: list[list[float]] = []  # responses to the newest kind that passed, and all, in each step

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if getattr(pl_module, "dynamic_sampling", None) is not None:
            raise MisconfigurationException(
                "`data.mixture.curriculum` counts the responses to a step's prompts, which `model.dynamic_sampling`"
                " leaves out in part. Take either of them out."
            )

    def on_experience(self, module: Any, scored: Any, experience: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        """Count what a step learns from. Collective."""
        del experience
        number = self._loader.num_handed_out - 1
        newest = self._mixture.kinds_at(number)[-1]
        result, prompts = scored.reward_result, scored.rollout.prompt_index.tolist()
        is_newest = torch.tensor([self._loader.kind_of(rows[index]) == newest for index in prompts])
        counts = is_newest.to(result.rewards.device) & result.is_valid
        passes = counts & (result.rewards >= self._config.success_reward)
        sums = torch.stack([passes.sum(), counts.sum()]).double()
        self._counts.append(module.contract.sum_over_data_parallel(sums).tolist())
        self._counts = self._counts[-self._config.num_steps :]
        passed, total = map(sum, zip(*self._counts, strict=True))
        rate = passed / max(1.0, total)
        module.log("curriculum/pass_rate", rate, batch_size=1)
        module.log("curriculum/kinds", float(len(self._mixture.kinds_at(number))), batch_size=1)
        if any(first > number for first in self._mixture.joined):  # the next kind is on its way
            self._counts = []
        if self._mixture.is_complete or len(self._counts) < self._config.num_steps:
            return
        if total and rate >= self._config.pass_rate:
            ahead = getattr(module.rollout_source, "max_staleness", 0)  # batches that were asked for already
            self._mixture.joined.append(number + 1 + ahead)
            self._counts = []
            rank_zero_info(f"{rate:.0%} of the responses to `{newest}` pass: the next kind of prompts joins.")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"counts": self._counts}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._counts = state_dict["counts"]
