"""Distillation as a part of a module: the roles of its teachers, and what a batch learns from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from verl_lightning.models.config import ModelConfig
from verl_lightning.models.scorer import TokenScorer
from verl_lightning.models.size import ModelRole
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.micro_batches import BatchSplitter
from verl_lightning.modules.resume_checks import Identity
from verl_lightning.modules.teacher import Rows, Teachers, check_heads, check_teachers
from verl_lightning.modules.teacher_config import TeacherConfig
from verl_lightning.telemetry.speed import Work, scoring_work
from verl_lightning.types import BatchT


class Distillation:
    """Teachers of a module's policy; their models are none of the module's own.

    Args:
        config: Options.
        policy: Settings of the policy.
    """

    def __init__(self, config: TeacherConfig, policy: ModelConfig) -> None:
        self.config = config
        self._configs = config.models(policy)
        self._models: dict[str, TokenScorer] = {}

    @property
    def roles(self) -> list[ModelRole]:
        """The models that teach and are not the policy."""
        is_kept = self.config.update_every is not None
        return [
            ModelRole(name, config, "policy", False, "model.teacher", is_kept=is_kept and name == "teacher")
            for name, config in self._configs.items()
        ]

    def work(self, policy: TokenScorer) -> list[Work]:
        """Returns the matrix products of the teacher; none where it is not one on these devices that reads all tokens.

        Args:
            policy: The student, which may teach itself.
        """
        models = [policy] if self.config.is_policy else list(self._models.values())
        return [scoring_work("teacher_infer", "teacher", model) for model in models if not self.config.by_source]

    def check(self, module: PostTrainingModule) -> None:
        """Refuses teachers that the policy can't be compared with, before any is loaded."""
        path, can_distil = module.policy_config.path, module.contract.distils
        check_teachers(self.config, path, module.tokenizer, can_distil=can_distil)

    def take(self, models: Mapping[str, TokenScorer], policy: TokenScorer) -> TokenScorer | None:
        """Takes the models of its roles; returns that which checkpoints must hold, if there is one."""
        self._models = {name: models[name] for name in self._configs}
        check_heads({"policy": policy, **self._models})
        return self._models["teacher"] if self.config.update_every is not None else None

    def teach(self, module: PostTrainingModule, splitter: BatchSplitter, batch: BatchT, rows: Rows = ()) -> BatchT:
        """Returns a batch with the teachers' distributions, after their update where that is due. Collective.

        Args:
            module: Module whose policy learns.
            splitter: Cuts what is scored at once on a rank.
            batch: Sequences to learn.
            rows: Data row of each sequence.
        """
        data = getattr(module.trainer, "datamodule", None)
        teachers = Teachers(
            config=self.config,
            contract=module.contract,
            policy=module.policy,
            models=self._models,
            tokenizer=module.tokenizer,
            splitter=splitter,
            enable_thinking=getattr(data, "enable_thinking", None),
        )
        teachers.update(module.trainer.global_step)
        return teachers.teach(batch, rows)

    def identities(self) -> dict[str, Identity]:
        """Identities of the teachers' weights. Collective."""
        shown = {role.name: role for role in self.roles if not role.is_kept}
        return {
            f"{name} in {role.config.dtype}": Identity(
                key=role.key,
                what="a teacher",
                shown=role.config.path,
                digest=self._models[name].base_fingerprint(),
            )
            for name, role in shown.items()
            if name in self._models
        }

    def settings(self) -> dict[str, Any]:
        """Options by the user's keys, whose changes are reported when a run is resumed."""
        return {f"model.teacher.{name}": value for name, value in asdict(self.config).items()}


class TaughtModule(PostTrainingModule):
    """A module whose policy may learn from teachers; see `Distillation`."""

    distillation: Distillation | None = None

    @override
    def find_identities(self) -> dict[str, Identity]:
        found = super().find_identities()
        if self.distillation is not None and self.trainer.state.fn == TrainerFn.FITTING:  # else nothing asks it
            found |= self.distillation.identities()
        return found

    @override
    def told_settings(self) -> dict[str, Any]:
        return super().told_settings() | (self.distillation.settings() if self.distillation else {})


def check_offline(config: TeacherConfig) -> None:
    """Refuses options that need prompts, for a model that learns from written examples.

    Args:
        config: Options.

    Raises:
        ValueError: If one is set.
    """
    for name in ("by_source", "context", "update_every"):
        if getattr(config, name):
            raise ValueError(
                f"`model.teacher.{name}` is for policies that learn from their own responses, as under `PPOModule`."
                " Leave it out."
            )
    if config.aggregation != type(config).aggregation:
        raise ValueError(
            f"`model.teacher.aggregation` ({config.aggregation}) is for policies that learn from their own responses:"
            " the loss of examples is a mean over tokens. Leave it out."
        )
