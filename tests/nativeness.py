"""What Lightning has in stock for a run, and what becomes of it under this package's modules.

`docs/make_nativeness.py` writes the README's table from it. `tests/test_nativeness.py` tries each line, and knows when
Lightning has something that no line is about.
"""

from __future__ import annotations

from typing import NamedTuple


class Stock(NamedTuple):
    """Something of Lightning's, and what becomes of it."""

    refusal: str = ""
    """Sentence by which it is refused; empty where it works."""

    test: str = ""
    """Test that shows that it works, below ``tests``; empty where `tests/test_nativeness.py` does."""

    only_ppo: bool = False
    """True where `PPOModule` alone refuses it, and it works under `SFTModule` and `DPOModule`."""


STOCK = "callbacks/test_stock_callbacks.py"
LAYERS = "looks for layers in `setup`, before models are built and spread over devices, and would find none."

CALLBACKS = {
    "BackboneFinetuning": Stock(f"`BackboneFinetuning` {LAYERS}"),
    "BaseFinetuning": Stock(f"`BaseFinetuning` {LAYERS}"),
    "BasePredictionWriter": Stock(),
    "BatchSizeFinder": Stock(
        "`BatchSizeFinder` tries sizes of one `batch_size`, which PPO does not have.", only_ppo=True
    ),
    "DeviceStatsMonitor": Stock(test=f"{STOCK}::test_device_stats_are_logged_each_iteration"),
    "EMAWeightAveraging": Stock(test=f"{STOCK}::test_an_exponential_average_replaces_the_weights_at_the_end"),
    "EarlyStopping": Stock(test=f"{STOCK}::test_early_stopping_ends_the_run_when_the_reward_stands_still"),
    "GradientAccumulationScheduler": Stock(
        "`GradientAccumulationScheduler` has no effect on PPO, which cuts its batches itself.", only_ppo=True
    ),
    "LambdaCallback": Stock(),
    "LearningRateFinder": Stock(
        "`LearningRateFinder` sets one `lr` attribute, but each model here has its own `optim.lr`."
    ),
    "LearningRateMonitor": Stock(test=f"{STOCK}::test_learning_rates_of_all_models_are_logged_each_iteration"),
    "ModelCheckpoint": Stock(test=f"{STOCK}::test_checkpoints_are_written_every_n_iterations"),
    "ModelCheckpoint(train_time_interval=...)": Stock(test=f"{STOCK}::test_checkpoints_are_written_by_the_clock"),
    "ModelPruning": Stock(f"`ModelPruning` {LAYERS}"),
    "ModelSummary": Stock(test=f"{STOCK}::test_the_summary_counts_actor_and_critic"),
    "OnExceptionCheckpoint": Stock(test=f"{STOCK}::test_a_run_that_fails_saves_where_it_was"),
    "RichModelSummary": Stock(test=f"{STOCK}::test_the_summary_counts_actor_and_critic"),
    "RichProgressBar": Stock(test=f"{STOCK}::test_progress_bars_show_iterations_reward_and_speed"),
    "SpikeDetection": Stock(),
    "StochasticWeightAveraging": Stock(
        "`StochasticWeightAveraging` copies the module before its model is built, and would average nothing."
    ),
    "TQDMProgressBar": Stock(test=f"{STOCK}::test_progress_bars_show_iterations_reward_and_speed"),
    "ThroughputMonitor": Stock(),
    "Timer": Stock(test=f"{STOCK}::test_the_timer_stops_the_run_early"),
    "WeightAveraging": Stock(test="modules/test_weight_averaging.py"),
}
"""Callbacks by name, but for those that only others are made of."""

LOGGERS = {
    "CSVLogger": Stock(test="callbacks/test_loggers.py::test_global_step_is_the_number_of_finished_iterations"),
    "CometLogger": Stock("`trainer.logger: CometLogger` needs the package `comet_ml`, which is not installed."),
    "LitLogger": Stock("`trainer.logger: LitLogger` needs the package `litlogger`, which is not installed."),
    "MLFlowLogger": Stock("`trainer.logger: MLFlowLogger` needs the package `mlflow`, which is not installed."),
    "TensorBoardLogger": Stock(test="cli/test_runs.py::test_every_logger_gets_the_settings"),
    "WandbLogger": Stock(test="callbacks/test_loggers.py::test_an_offline_wandb_run_holds_metrics_tables_and_settings"),
}
"""Loggers by name; of those whose package the tests lack, only that they ask for it is known."""

BY_HAND = {
    "`MLFlowLogger` with mlflow-skinny 3.17.2 writes its metrics to files, of two PPO steps": "works",
    "`SwanLabLogger` of swanlab 0.10.3, offline, of two PPO steps; it wants protobuf below 7": "works",
    "`CometLogger` with comet-ml 3.58.8, offline: training ends, but leaves no archive": "not shown to work",
    "Trackio 0.0.6 has no logger for Lightning": "not tried",
}
"""What was tried once by hand, on 2026-11-30, as the tests lack the packages; and what came of it."""

PROFILERS = {
    "AdvancedProfiler": Stock(),
    "PassThroughProfiler": Stock(),
    "PyTorchProfiler": Stock(),
    "SimpleProfiler": Stock(test=f"{STOCK}::test_the_simple_profiler_names_the_phases"),
}
"""Profilers by name."""

NO_ENGINE = "`trainer.precision: transformer-engine` needs the package `transformer_engine`, which is not installed."

PRECISIONS = {
    "32-true": Stock(test=f"{STOCK}::test_checkpoints_are_written_every_n_iterations"),
    "64-true": Stock(),
    "bf16-mixed": Stock(),
    "bf16-true": Stock(),
    "16-mixed": Stock(),
    "16-true": Stock(),
    "transformer-engine": Stock(NO_ENGINE),
    "transformer-engine-float16": Stock(NO_ENGINE),
}
"""Values of `trainer.precision` under `auto` and `ddp`; `fsdp` and `megatron` know 32-true and bf16-mixed."""

NOT_OURS = "`trainer.strategy: deepspeed` is Lightning's own, under which `PPOModule` can't train its models in turn."

STRATEGIES = {
    "auto": Stock(test=f"{STOCK}::test_checkpoints_are_written_every_n_iterations"),
    "ddp": Stock(test="strategies/test_conformance.py"),
    "fsdp": Stock(test="strategies/test_fsdp.py"),
    "megatron": Stock(test="strategies/megatron/training_checks.py"),
    "single_device": Stock(),
    "ddp_*": Stock(NOT_OURS),
    "deepspeed*": Stock(NOT_OURS),
    "fsdp_cpu_offload": Stock(NOT_OURS),
    "single_tpu": Stock(NOT_OURS),
    "single_xla": Stock(NOT_OURS),
    "xla*": Stock(NOT_OURS),
}
"""Names of `trainer.strategy`, where a star stands for any ending; `ddp`, `fsdp` and `megatron` are this package's."""

TRIED = Stock()

FLAGS = {
    "accelerator": Stock(test="cli/test_errors.py"),
    "accumulate_grad_batches": Stock(
        "`trainer.accumulate_grad_batches` (2) does not apply to PPO, which cuts its batches itself.", only_ppo=True
    ),
    "barebones": TRIED,
    "benchmark": TRIED,
    "callbacks": Stock(test="callbacks/test_stock_callbacks.py"),
    "check_val_every_n_epoch": Stock(test="modules/test_ppo_validation.py"),
    "default_root_dir": Stock(test="cli/test_run_folders.py::test_a_run_is_named_by_its_configuration_and_the_time"),
    "detect_anomaly": TRIED,
    "deterministic": TRIED,
    "devices": Stock(test="strategies/test_conformance.py"),
    "enable_autolog_hparams": TRIED,
    "enable_checkpointing": Stock(test="cli/test_runs.py"),
    "enable_model_summary": Stock(test=f"{STOCK}::test_the_summary_counts_actor_and_critic"),
    "enable_progress_bar": Stock(test=f"{STOCK}::test_progress_bars_show_iterations_reward_and_speed"),
    "fast_dev_run": Stock(test=f"{STOCK}::test_fast_dev_run_is_one_iteration_and_one_validation"),
    "gradient_clip_algorithm": Stock(
        "`trainer.gradient_clip_algorithm` (value) does not reach PPO's models, whose gradients are clipped by their"
        " global norm.",
        only_ppo=True,
    ),
    "gradient_clip_val": Stock("`trainer.gradient_clip_val` (1.0) does not reach PPO's models.", only_ppo=True),
    "inference_mode": TRIED,
    "limit_predict_batches": TRIED,
    "limit_test_batches": TRIED,
    "limit_train_batches": TRIED,
    "limit_val_batches": TRIED,
    "log_every_n_steps": Stock(test="callbacks/test_loggers.py"),
    "logger": Stock(test="callbacks/test_loggers.py"),
    "max_epochs": TRIED,
    "max_steps": Stock(test="resume/test_exact_resume.py"),
    "max_time": Stock(test=f"{STOCK}::test_the_timer_stops_the_run_early"),
    "min_epochs": TRIED,
    "min_steps": TRIED,
    "num_nodes": Stock(test="ray/test_launch.py"),
    "num_sanity_val_steps": Stock(test="callbacks/test_samples_table.py::test_the_sanity_check_writes_no_table"),
    "overfit_batches": TRIED,
    "plugins": TRIED,
    "precision": TRIED,
    "profiler": TRIED,
    "reload_dataloaders_every_n_epochs": TRIED,
    "strategy": Stock(test="strategies/test_conformance.py"),
    "sync_batchnorm": TRIED,
    "use_distributed_sampler": TRIED,
    "val_check_interval": Stock(test="modules/test_dynamic_sampling.py"),
}
"""Options of `Trainer` by name."""

NOT_TRIED = {
    "Callback",
    "Checkpoint",
    "ProgressBar",
    "Logger",
    "Profiler",
    "XLAProfiler",
    "model_registry",
}
"""Bases of others, what is for TPUs, on which nothing trains, and what needs an account of Lightning's cloud."""
