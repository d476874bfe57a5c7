"""The callbacks that every module brings, and those of the user's that it refuses."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, LearningRateFinder, ModelPruning, StochasticWeightAveraging
from typing_extensions import override

from verl_lightning.modules.interrupted_step import FinishInterruptedStep
from verl_lightning.modules.lost_updates import WarnOfLostUpdates
from verl_lightning.modules.preemption import Preemption, preemption_of
from verl_lightning.modules.run_settings import KeepPatience
from verl_lightning.modules.weight_averaging import complete_averaging
from verl_lightning.telemetry.batch_phases import BatchPhases
from verl_lightning.telemetry.memory_plan import memory_plan
from verl_lightning.telemetry.phases import CheckpointClock, users_profiler
from verl_lightning.telemetry.speed import mfu_notice


class TeardownOnException(Callback):
    """Has the module free what it holds when a run fails: Lightning calls ``teardown`` after good runs only."""

    @override
    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        pl_module.teardown("")


class TimeCheckpoints(Callback):
    """Makes writing a checkpoint a phase while a run lasts."""

    @override
    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        trainer.profiler = CheckpointClock(pl_module, users_profiler(trainer))  # type: ignore[attr-defined]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        rank_zero_info(mfu_notice(pl_module.device))

    @override
    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        trainer.profiler = users_profiler(trainer)  # type: ignore[attr-defined]


class PrintMemoryPlan(Callback):
    """Shows what a run will need of each device, once, and warns where it does not fit."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        plan = memory_plan(pl_module)
        pl_module.print_table(plan.table())
        if (warning := plan.warning()) is not None:
            rank_zero_warn(warning)


def own_callbacks(trainer: Trainer, *, automatic_optimization: bool, holds_whole_models: bool) -> list[Callback]:
    """Returns the callbacks that a module adds to its trainer's.

    Args:
        trainer: Trainer of the run.
        automatic_optimization: True if Lightning calls the optimizer.
        holds_whole_models: True if each rank holds whole models.
    """
    phases = [BatchPhases()] if automatic_optimization else []
    averaging = complete_averaging(trainer, holds_whole_models=holds_whole_models)
    ending = [] if preemption_of(trainer) else [Preemption()]
    telling = PrintMemoryPlan(), WarnOfLostUpdates()
    always = TimeCheckpoints(), *telling, TeardownOnException(), FinishInterruptedStep(), KeepPatience()
    return [*phases, *averaging, *always, *ending]


def check_callback(callback: Callback) -> None:
    """Refuses a callback that would do nothing, or harm, in silence.

    Raises:
        MisconfigurationException: With what to use instead.
    """
    if isinstance(callback, StochasticWeightAveraging):
        raise MisconfigurationException(
            "`StochasticWeightAveraging` copies the module before its model is built, and would average nothing."
            " Use Lightning's `EMAWeightAveraging`, or `WeightAveraging` with an averaging function of your own."
        )
    if isinstance(callback, BaseFinetuning | ModelPruning):
        raise MisconfigurationException(
            f"`{type(callback).__name__}` looks for layers in `setup`, before models are built and spread over"
            " devices, and would find none. Train a part of a model with `model.actor.lora`, whose `target_modules`"
            " and `modules_to_save` say which; prune the folder that `HFCheckpoint` writes."
        )
    if isinstance(callback, LearningRateFinder):
        raise MisconfigurationException(
            "`LearningRateFinder` sets one `lr` attribute, but each model here has its own `optim.lr`."
            " Compare short runs with different `optim.lr` and `trainer.max_steps` instead."
        )
