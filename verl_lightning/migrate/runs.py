"""Translates verl's trainer, logging, checkpoints and profiler."""

from __future__ import annotations

from typing import Any

from verl_lightning.migrate.parts import Findings, Remark, Setting, VerlConfig, at_home

TRAINER_DEFAULTS: dict[str, Any] = {
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.total_epochs": 30,
    "trainer.total_training_steps": None,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "trainer.val_before_train": True,
    "trainer.critic_warmup": 0,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.logger": ["console", "wandb"],
}
LOGGERS = {"wandb": "WandbLogger", "tensorboard": "TensorBoardLogger", "mlflow": "MLFlowLogger"}
TOOLS = {"torch": "torch", "nsys": "nsys", "torch_memory": "memory"}


def total_steps(verl: VerlConfig) -> int | None:
    """Returns the steps of the run, None where verl was not told them."""
    steps = verl["trainer.total_training_steps"]
    return int(steps) if isinstance(steps, (int, float)) and steps > 0 else None


def translate_length(verl: VerlConfig) -> Findings:
    """Translates the length of the run, and how often it is validated."""
    steps, key = total_steps(verl), "trainer.total_training_steps"
    if steps is not None:
        yield Setting(key="trainer.max_steps", value=steps, sources=(key,))
    elif key in verl.given:
        yield Remark(source=key, reason="null: the epochs decide", needed=False)
    key = "trainer.total_epochs"
    if isinstance(verl[key], (int, float)):
        yield Setting(key="trainer.max_epochs", value=verl.whole(key), sources=(key,))
    else:
        yield Remark(source=key, reason="its value is known to the shell only: set `trainer.max_epochs`")
    yield Setting(key="trainer.check_val_every_n_epoch", value=None, sources=())
    key = "trainer.test_freq"
    if isinstance(verl[key], (int, float)) and verl[key] > 0:
        yield Setting(key="trainer.val_check_interval", value=verl.whole(key), sources=(key,))
    else:
        yield Setting(key="trainer.limit_val_batches", value=0, sources=(key,), note="no validation")


def translate_callbacks(verl: VerlConfig, *, rollout: bool) -> Findings:
    """Translates checkpoints, and adds callbacks of our shipped configurations."""
    callbacks: list[dict[str, Any]] = []
    key, keep = "trainer.save_freq", verl.first("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep")
    saves = isinstance(verl[key], (int, float)) and verl[key] > 0
    sources: tuple[str, ...] = (key,)
    if saves:
        sources = (key, keep) if keep in verl.given else (key,)
        options = {
            "save_top_k": -1 if verl[keep] is None else 0,
            "save_last": True,
            "every_n_train_steps": verl.whole(key),
        }
        callbacks.append({"class_path": "ModelCheckpoint", "init_args": options})
    note = "only the last checkpoint is kept" if saves and verl[keep] is not None else ""
    callbacks += [{"class_path": name} for name in ("HFCheckpoint", "LearningRateMonitor", "PhaseProgressBar")]
    if rollout:
        callbacks.append({"class_path": "SamplesTable"})
    if "wandb" in logger_names(verl):
        callbacks.append({"class_path": "ResumeWandb"})
    yield Setting(key="trainer.callbacks", value=callbacks, sources=sources, note=note)
    if keep in verl.given and keep not in sources:
        yield Remark(source=keep, reason="no checkpoints are saved between (`save_freq` is not above 0)", needed=False)


def logger_names(verl: VerlConfig) -> list[str]:
    """Returns the names of verl's loggers."""
    names = verl["trainer.logger"]
    return [str(name) for name in (names if isinstance(names, list) else [names])]


def translate_loggers(verl: VerlConfig) -> Findings:
    """Translates the loggers, the run's names in them, and the folder of its files."""
    project, name = "trainer.project_name", "trainer.experiment_name"
    loggers, used = [], []
    for logger in logger_names(verl):
        if logger in LOGGERS:
            loggers.append({"class_path": LOGGERS[logger], "init_args": logger_options(verl, logger)})
            used += [key for key in (project, name) if key in verl.given]
        elif logger != "console":
            yield Remark(
                source="trainer.logger", reason=f"there is no logger {logger}; give a Lightning logger's class"
            )
    if loggers:
        yield Setting(key="trainer.logger", value=loggers, sources=("trainer.logger", *used))
    elif "trainer.logger" in verl.given:
        yield Remark(source="trainer.logger", reason="metrics go to the console and to a CSV file", needed=False)
    for key in (project, name):
        if key in verl.given and key not in used:
            yield Remark(source=key, reason="`--name` names a run and its folder", needed=False)
    key = "trainer.default_local_dir"
    if key in verl.given:
        yield Setting(key="trainer.default_root_dir", value=at_home(str(verl[key])), sources=(key,))


def logger_options(verl: VerlConfig, logger: str) -> dict[str, Any]:
    """Returns the project and name of a run, in the words of its logger."""
    project, name = str(verl["trainer.project_name"]), str(verl["trainer.experiment_name"])
    return {
        "wandb": {"project": project, "name": name},
        "tensorboard": {"save_dir": "runs", "name": f"{project}/{name}"},
        "mlflow": {"experiment_name": project, "run_name": name},
    }[logger]


def translate_profiler(verl: VerlConfig) -> Findings:
    """Translates the steps that are profiled, and the tool that records them."""
    tool, steps = "global_profiler.tool", "global_profiler.steps"
    if verl[tool] in TOOLS and isinstance(verl[steps], list) and verl[steps]:
        options: dict[str, Any] = {"tool": TOOLS[verl[tool]], "steps": [int(step) for step in verl[steps]]}
        ranks = "actor_rollout_ref.actor.profiler.ranks"
        chosen = isinstance(verl[ranks], list) and bool(verl[ranks])
        options |= {"ranks": verl[ranks]} if chosen else {}
        value = {"class_path": "ProfilerCallback", "init_args": options}
        yield Setting(key="profile", value=value, sources=(tool, steps, ranks) if chosen else (tool, steps))
        return
    known = verl[tool] in TOOLS or verl[tool] is None or not verl[steps]
    for key in (tool, steps):
        if key in verl.given:
            reason = "no step is profiled" if known else f"there is no tool {verl[tool]}; torch, nsys and memory are"
            yield Remark(source=key, reason=reason, needed=not known)
