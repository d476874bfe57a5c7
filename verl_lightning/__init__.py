"""RL post-training of language models as Lightning modules, strategies and callbacks.

Everything that a training script needs can be imported from here; torch and Lightning are imported with the first name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_lightning.callbacks import (
        BaselineValidation,
        FinalValidation,
        HealthMonitor,
        HFCheckpoint,
        HFRollout,
        PhaseProgressBar,
        Preemption,
        ProfilerCallback,
        RayRollout,
        ResumeWandb,
        RunReport,
        SamplesTable,
        VLLMRollout,
    )
    from verl_lightning.cli.lightning_cli import CLI
    from verl_lightning.data import ChatDataModule, PreferenceDataModule, PromptDataModule
    from verl_lightning.environments.base import Environment, Step
    from verl_lightning.environments.config import EpisodesConfig
    from verl_lightning.loggers import ResumableCSVLogger
    from verl_lightning.models.config import LoraConfig, ModelConfig, OptimConfig
    from verl_lightning.modules import DPOModule, PPOModule, RewardModule, SFTModule
    from verl_lightning.modules.ppo_config import (
        CriticConfig,
        DynamicSamplingConfig,
        KLConfig,
        ShapingConfig,
        UpdateConfig,
        ValidationConfig,
    )
    from verl_lightning.modules.teacher_config import TeacherConfig
    from verl_lightning.phases import Phases
    from verl_lightning.rewards.base import RewardSample
    from verl_lightning.rewards.config import RewardConfig, RewardModelConfig, WeightedReward
    from verl_lightning.rollout.base import SamplingConfig
    from verl_lightning.rollout.turns import TurnsConfig
    from verl_lightning.strategies import DDPStrategy, FSDPStrategy, MegatronStrategy

__version__ = "0.1.0.dev0"

_NAMES = {
    "algorithms.advantages": (
        "GAE",
        "GDPO",
        "GPG",
        "GRPO",
        "GRPOPassK",
        "OPO",
        "OptimalTokenBaseline",
        "RLOO",
        "ReMax",
        "ReinforcePlusPlus",
        "ReinforcePlusPlusBaseline",
        "TurnDiscount",
        "TurnGAE",
    ),
    "algorithms.corrections": (
        "IcePop",
        "Rejection",
        "SequenceMask",
        "TruncatedImportanceSampling",
    ),
    "algorithms.losses": (
        "CISPO",
        "ClipCov",
        "DPPOKL",
        "DPPOTV",
        "DRO",
        "GPGLoss",
        "GSPO",
        "GeoMean",
        "KLCov",
        "PPOClip",
        "Reinforce",
        "SAPO",
        "VESPO",
    ),
    "algorithms.preferences": ("DPO", "HingeDPO", "IPO", "KTO", "ORPO", "RobustDPO", "SimPO"),
    "callbacks": (
        "BaselineValidation",
        "FinalValidation",
        "HFCheckpoint",
        "HFRollout",
        "HealthMonitor",
        "PhaseProgressBar",
        "Preemption",
        "ProfilerCallback",
        "RayRollout",
        "ResumeWandb",
        "RunReport",
        "SamplesTable",
        "VLLMRollout",
    ),
    "cli.lightning_cli": ("CLI",),
    "data": (
        "ChatDataModule",
        "PreferenceDataModule",
        "PromptDataModule",
    ),
    "environments.base": ("Environment", "Step"),
    "environments.config": ("EpisodesConfig",),
    "loggers": ("ResumableCSVLogger",),
    "models.config": (
        "LoraConfig",
        "ModelConfig",
        "OptimConfig",
    ),
    "modules": (
        "DPOModule",
        "PPOModule",
        "RewardModule",
        "SFTModule",
    ),
    "modules.ppo_config": (
        "CriticConfig",
        "DynamicSamplingConfig",
        "KLConfig",
        "ShapingConfig",
        "UpdateConfig",
        "ValidationConfig",
    ),
    "modules.teacher_config": ("TeacherConfig",),
    "phases": ("Phases",),
    "rewards": ("RewardSample",),
    "rewards.config": ("RewardConfig", "RewardModelConfig", "WeightedReward"),
    "rollout.base": ("SamplingConfig",),
    "rollout.turns": ("TurnsConfig",),
    "strategies": (
        "DDPStrategy",
        "FSDPStrategy",
        "MegatronStrategy",
    ),
}
"""Public names of each module below this one."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Imports a public name from its module when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Lists the public names, imported or not."""
    return sorted({*globals(), *_HOMES})
