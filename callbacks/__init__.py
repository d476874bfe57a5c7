"""Callbacks: what can be swapped or left out of a run."""

from verl_lightning.callbacks.baseline_validation import BaselineValidation
from verl_lightning.callbacks.final_validation import FinalValidation
from verl_lightning.callbacks.health import HealthCheck, HealthMonitor
from verl_lightning.callbacks.hf_checkpoint import HFCheckpoint
from verl_lightning.callbacks.hf_rollout import HFRollout
from verl_lightning.callbacks.numa import NumaAffinity
from verl_lightning.callbacks.placement import Beside, Placement, RayActors
from verl_lightning.callbacks.profiler import ProfilerCallback, StepRange
from verl_lightning.callbacks.progress import PhaseProgressBar
from verl_lightning.callbacks.ray_rollout import RayRollout
from verl_lightning.callbacks.response_metrics import ResponseMetrics
from verl_lightning.callbacks.resume_wandb import ResumeWandb
from verl_lightning.callbacks.rollout import RolloutCallback
from verl_lightning.callbacks.run_report import RunReport
from verl_lightning.callbacks.samples_table import SamplesTable
from verl_lightning.callbacks.vllm_rollout import VLLMRollout
from verl_lightning.modules.preemption import Preemption

__all__ = [
    "BaselineValidation",
    "Beside",
    "FinalValidation",
    "HFCheckpoint",
    "HFRollout",
    "HealthCheck",
    "HealthMonitor",
    "NumaAffinity",
    "PhaseProgressBar",
    "Placement",
    "Preemption",
    "ProfilerCallback",
    "RayActors",
    "RayRollout",
    "ResponseMetrics",
    "ResumeWandb",
    "RolloutCallback",
    "RunReport",
    "SamplesTable",
    "StepRange",
    "VLLMRollout",
]
