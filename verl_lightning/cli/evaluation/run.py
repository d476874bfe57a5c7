"""An evaluation: the run's module and engine are made ready as for its validation, and tasks ask them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from verl_lightning.callbacks.rollout import RolloutCallback
from verl_lightning.cli.evaluation.command import EvaluationOptions
from verl_lightning.cli.evaluation.policy import Policy, Score
from verl_lightning.cli.lightning_cli import CLI
from verl_lightning.modules.sampling import SamplingModule
from verl_lightning.run_folders import run_folder


class NoBatches:
    """Loader without batches, under which Lightning makes all ready and runs the hooks of its loop."""

    def __iter__(self) -> Iterator[object]:
        return iter(())


class Evaluation(Callback):
    """Has tasks ask the policy as soon as the engine has started.

    Args:
        ask: Function that runs the tasks on a policy and returns their scores.
    """

    def __init__(self, ask: Callable[[Policy], list[Score]]) -> None:
        self.ask = ask
        self.scores: list[Score] = []

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, SamplingModule)
        rollout = pl_module.rollout_source
        assert isinstance(rollout, RolloutCallback)
        self.scores = self.ask(Policy(pl_module, rollout.ready_to_answer(pl_module)))


def evaluate(options: EvaluationOptions, arguments: Sequence[str]) -> tuple[Path, list[Score]]:
    """Runs the tasks on a run's policy.

    Args:
        options: Options of the tasks.
        arguments: Words of a validation of the run, in order.

    Returns:
        Folder of the evaluation, and its scores.

    Raises:
        ValueError: If the run's module does not sample.
    """
    cli = CLI(arguments, run=False)
    trainer, module = cli.trainer, cli.model
    if not isinstance(module, SamplingModule):
        raise ValueError(
            f"`{type(module).__name__}` has no engine that answers. Evaluate the folder that it has written:"
            " `--config grpo --model.actor.path FOLDER`."
        )
    kind = "lm_eval_model" if options.tasks else "inspect_model"
    harness = importlib.import_module(f"verl_lightning.cli.evaluation.{kind}")  # which needs its package
    evaluation = Evaluation(functools.partial(harness.evaluate, options=options))
    trainer.callbacks.append(evaluation)  # type: ignore[attr-defined]  # behind the rollout callback, which starts the engine
    path = cli.built("ckpt_path")
    rank_zero_info(f"Evaluating {f'the checkpoint `{path}`' if path else f'`{module.policy_config.path}`'}.")
    trainer.predict(module, NoBatches(), ckpt_path=path, return_predictions=False, weights_only=True)
    return Path(run_folder(trainer)), evaluation.scores
