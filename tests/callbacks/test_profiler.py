"""Traces of chosen steps, ranks and phases, their report, and what can't be had."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler

from tests.processes import on_ranks
from tests.runs import (
    make_chats,
    make_model_config,
    make_ppo,
    make_prompts,
    make_rollout,
    make_sft,
    make_trainer,
)
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.callbacks import ProfilerCallback, StepRange, profile_tools
from verl_lightning.callbacks import profiler as profiler_file
from verl_lightning.callbacks.profile_report import Interval, StepRecord, summary_rows, timeline_page
from verl_lightning.callbacks.profile_tools import MemoryTool, NsysTool, make_tool
from verl_lightning.modules.ppo_config import CriticConfig, KLConfig
from verl_lightning.strategies import STRATEGIES

PPO_PHASES = {
    *("update_weights", "gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"),
    *("metrics", "save_checkpoint"),
}
SFT_PHASES = {"forward_backward", "optimizer", "save_checkpoint"}
RANGES = {"ppo": PPO_PHASES | {"mini_batch", "micro_batch"}}
RANGES["sft"] = SFT_PHASES | {"mini_batch", "micro_batch", "forward", "backward"}


def train(task: str, folder: Path, model: Path, data: Path, *profilers: Callback, **options):
    """Three steps of PPO with all its models, or of SFT, with a checkpoint after each; profilers come last."""
    strategy = options.pop("strategy", "auto")
    ckpt_path = options.pop("ckpt_path", None)
    options = {"strategy": STRATEGIES[strategy]() if strategy in STRATEGIES else strategy, "max_steps": 3} | options
    saves = ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=1, save_top_k=-1)
    if task == "ppo":
        critic = CriticConfig(model=make_model_config(model))
        module = make_ppo(model, advantage=GAE(), critic=critic, kl=KLConfig())
        callbacks, loader = [make_rollout(), *profilers, saves], make_prompts(data)
    else:
        module, callbacks, loader = make_sft(model), [*profilers, saves], make_chats(data)
    trainer = make_trainer(folder, *callbacks, enable_checkpointing=True, log_every_n_steps=1, **options)
    trainer.fit(module, datamodule=loader, ckpt_path=ckpt_path)
    return trainer.global_rank


def names_in(trace: Path) -> set[str]:
    """Names of the ranges in a Chrome trace."""
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


def traces(folder: Path) -> set[str]:
    """Names of the traces in a folder, without their ending."""
    return {path.name.removesuffix(".json.gz") for path in folder.glob("*.json.gz")}


@pytest.fixture
def files(prompt_file, chat_file):
    return {"ppo": prompt_file, "sft": chat_file}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["ppo", "sft"])
@pytest.mark.parametrize("tool", ["torch", "memory"])
def test_traces_hold_every_phase_of_the_chosen_steps(tmp_path, tiny_folder, files, task, tool):
    profiler = ProfilerCallback(tool=tool, steps=[1, 3], folder=str(tmp_path / "out"))

    train(task, tmp_path, tiny_folder, files[task], profiler)

    assert traces(tmp_path / "out") == {f"{tool}_step={step}_rank=0" for step in (1, 3)}
    for step in (1, 3):
        names = names_in(tmp_path / "out" / f"{tool}_step={step}_rank=0.json.gz")
        assert names >= RANGES[task]
        assert {name for name in names if name.startswith("step ")} == {f"step {step}"}
    assert [record.step for record in profiler.records] == [1, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "strategy", "tool"),  # each pair once
    [("ppo", "ddp", "torch"), ("sft", "ddp", "memory"), ("sft", "fsdp", "torch"), ("ppo", "fsdp", "memory")],
)
def test_chosen_ranks_alone_write_traces(tmp_path, tiny_folder, files, task, strategy, tool):
    profiler = ProfilerCallback(tool=tool, steps=[2], ranks=[1], folder=str(tmp_path / "out"))

    on_ranks(2, _train_on_ranks, task, tmp_path, tiny_folder, files[task], profiler, strategy)

    assert traces(tmp_path / "out") == {f"{tool}_step=2_rank=1"}
    names = names_in(tmp_path / "out" / f"{tool}_step=2_rank=1.json.gz")
    assert names >= RANGES[task]
    assert {name for name in names if name.startswith("step ")} == {"step 2"}
    assert {path.name for path in (tmp_path / "out").glob("*.html")} == {"timeline_rank=1.html"}


def _train_on_ranks(task, folder, model, data, profiler, strategy):
    return train(task, folder, model, data, profiler, strategy=strategy, devices=2)


def test_phases_have_traces_of_their_own(tmp_path, tiny_folder, prompt_file):
    """Two optimizer steps an iteration."""
    profiler = ProfilerCallback(steps=[2], phases=["gen", "update_actor"], folder=str(tmp_path / "out"))

    train("ppo", tmp_path, tiny_folder, prompt_file, profiler)

    expected = {f"torch_step=2_{name}_rank=0" for name in ("gen_0", "update_actor_0", "update_actor_1")}
    assert traces(tmp_path / "out") == expected
    assert names_in(tmp_path / "out/torch_step=2_gen_0_rank=0.json.gz") & PPO_PHASES == {"gen"}


def test_accumulated_batches_are_one_step(tmp_path, tiny_folder, chat_file):
    profiler = ProfilerCallback(steps=[2], folder=str(tmp_path / "out"))

    train("sft", tmp_path, tiny_folder, chat_file, profiler, accumulate_grad_batches=3)

    (record,) = profiler.records
    names = [phase.name for phase in record.phases]
    assert names == ["forward_backward"] * 3 + ["optimizer", "save_checkpoint"]


def test_a_resumed_run_records_what_is_to_come(tmp_path, tiny_folder, chat_file):
    """Steps 1 and 2 are over."""
    train("sft", tmp_path, tiny_folder, chat_file, ProfilerCallback(steps=[1], folder=str(tmp_path / "a")), max_steps=2)
    profiler = ProfilerCallback(steps=StepRange(first=1, last=None, every=2), folder=str(tmp_path / "out"))

    train("sft", tmp_path, tiny_folder, chat_file, profiler, max_steps=5, ckpt_path=tmp_path / "saved/step=2.ckpt")

    assert traces(tmp_path / "out") == {"torch_step=3_rank=0", "torch_step=5_rank=0"}


def test_a_run_that_resumes_behind_all_steps_says_so(tmp_path, tiny_folder, chat_file):
    train("sft", tmp_path, tiny_folder, chat_file, ProfilerCallback(steps=[1], folder=str(tmp_path / "a")), max_steps=2)

    with pytest.warns(UserWarning, match="records nothing: the run goes on after step 2"):
        train(
            *("sft", tmp_path, tiny_folder, chat_file, ProfilerCallback(steps=[2])),
            ckpt_path=tmp_path / "saved/step=2.ckpt",
        )


class Fails(Callback):
    """Fails in the second step."""

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step == 1:
            raise RuntimeError("enough")


def test_a_step_that_fails_leaves_its_trace(tmp_path, tiny_folder, chat_file):
    profiler = ProfilerCallback(steps=[2], folder=str(tmp_path / "out"))

    with pytest.raises(RuntimeError, match="enough"):
        train("sft", tmp_path, tiny_folder, chat_file, profiler, Fails())

    assert "step 2" in names_in(tmp_path / "out/torch_step=2_rank=0.json.gz")


class TakesAllMemory(Callback):
    """Asks for more than any GPU has, in the second step."""

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step == 1:
            torch.empty(2**45, dtype=torch.uint8, device=pl_module.device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_exhausted_memory_leaves_a_snapshot(tmp_path, tiny_folder, chat_file):
    profiler = ProfilerCallback(tool="memory", steps=[1], folder=str(tmp_path / "out"))

    with pytest.raises(torch.OutOfMemoryError):
        train("sft", tmp_path, tiny_folder, chat_file, profiler, TakesAllMemory(), accelerator="gpu")

    names = {path.name for path in (tmp_path / "out").glob("*.pickle")}
    assert names == {"memory_step=1_rank=0.pickle", "out_of_memory_rank=0.pickle"}


class RunsOutOfMemory(Callback):
    """Fails in the second step as a GPU would."""

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_snapshot_tells_of_exhausted_memory_in_any_step(tmp_path, tiny_folder, chat_file, monkeypatch):
    """The history and its snapshots are a GPU's; all else is real."""
    histories = []
    monkeypatch.setattr(profile_tools, "record_memory_history", histories.append)
    monkeypatch.setattr(profile_tools, "dump_memory_snapshot", lambda path: path.write_text("snapshot"))
    tool = MemoryTool(torch.device("cpu"))
    tool._has_history = True
    monkeypatch.setattr(profiler_file, "make_tool", lambda *_: tool)
    profiler = ProfilerCallback(tool="memory", steps=[1], folder=str(tmp_path / "out"))

    with pytest.raises(torch.OutOfMemoryError):
        train("sft", tmp_path, tiny_folder, chat_file, profiler, RunsOutOfMemory())

    names = {path.name for path in (tmp_path / "out").glob("*.pickle")}
    assert names == {"memory_step=1_rank=0.pickle", "out_of_memory_rank=0.pickle"}
    assert histories == [profile_tools.MAX_HISTORY, None]


@pytest.mark.parametrize("variable", profile_tools.NSYS_VARIABLES)
def test_nsys_must_have_started_the_process(monkeypatch, variable):
    for name in profile_tools.NSYS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="`nsys` has not started this process. Run `nsys profile .*cudaProfilerApi"):
        make_tool("nsys", torch.device("cuda"))

    monkeypatch.setenv(variable, "1")
    assert isinstance(make_tool("nsys", torch.device("cuda")), NsysTool)


def test_a_step_that_training_does_not_reach_is_missed(tmp_path, tiny_folder, chat_file):
    profiler = ProfilerCallback(steps=[2, 50], folder=str(tmp_path / "out"))

    with pytest.warns(UserWarning, match="could not record step 50: training ended with step 3"):
        train(*("sft", tmp_path, tiny_folder, chat_file, profiler), max_steps=-1, max_epochs=1, limit_train_batches=3)

    assert traces(tmp_path / "out") == {"torch_step=2_rank=0"}


def test_lightnings_simple_profiler_shows_the_same_phases_beside_it(tmp_path, tiny_folder, chat_file):
    profiler = ProfilerCallback(steps=[2], folder=str(tmp_path / "out"))

    train("sft", tmp_path, tiny_folder, chat_file, profiler, profiler=SimpleProfiler(tmp_path, "simple"))

    report = (tmp_path / "fit-simple.txt").read_text()
    assert all(f"[SFTModule]{name}" in report for name in SFT_PHASES)
    assert traces(tmp_path / "out") == {"torch_step=2_rank=0"}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["ppo", "sft"])
def test_lightnings_torch_profiler_shows_the_same_phases(tmp_path, tiny_folder, files, task):

    train(task, tmp_path, tiny_folder, files[task], max_steps=6, profiler=PyTorchProfiler(tmp_path, "torch"))

    trace = json.loads(next(tmp_path.glob("*.json")).read_text())
    names = {event["name"] for event in trace["traceEvents"] if "name" in event}
    assert names >= (PPO_PHASES if task == "ppo" else SFT_PHASES) - {"update_weights", "gen"}


def test_the_table_and_the_timeline_are_there(tmp_path, tiny_folder, chat_file, capsys):
    train("sft", tmp_path, tiny_folder, chat_file, ProfilerCallback(folder=str(tmp_path / "out")))

    shown = capsys.readouterr().out
    page = (tmp_path / "out/timeline_rank=0.html").read_text()
    for name in ("forward_backward", "optimizer", "save_checkpoint", "hooks and data"):
        assert name in shown
        assert name in page
    assert "1 traces and" in shown
    assert "http" not in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": [4]}, "asks for step 4, but training ends with step 3"),
        ({"steps": StepRange(first=2, last=9)}, "asks for step 9, but training ends with step 3"),
        ({"ranks": [1]}, "asks for rank 1, but there are 1"),
        ({"phases": ["optimiser"]}, "asks for `optimiser`, .* Did you mean `optimizer`"),
        ({"tool": "nsys"}, "`profile.tool: nsys` records what an NVIDIA GPU does, but training runs on the CPU"),
    ],
)
def test_what_cant_be_had_is_refused_at_start(tmp_path, tiny_folder, chat_file, options, message):
    with pytest.raises(ValueError, match=message):
        train("sft", tmp_path, tiny_folder, chat_file, ProfilerCallback(**options))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ProfilerCallback(steps=[]), "at least one step"),
        (lambda: ProfilerCallback(steps=[0]), "counted from 1"),
        (lambda: ProfilerCallback(ranks=[]), "must not be empty"),
        (lambda: ProfilerCallback(phases=[]), "must not be empty"),
        (lambda: StepRange(first=0), "`steps.first` must be at least 1, got 0"),
        (lambda: StepRange(every=0), "`steps.every` must be at least 1, got 0"),
        (lambda: StepRange(first=3, last=2), r"`steps.last` \(2\) comes before"),
    ],
)
def test_settings_without_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_two_torch_profilers_are_refused(tmp_path, tiny_folder, chat_file):
    theirs = PyTorchProfiler(tmp_path)
    message = "both need torch's profiler"
    with pytest.raises(MisconfigurationException, match=message):
        train("sft", tmp_path, tiny_folder, chat_file, ProfilerCallback(), profiler=theirs)
    theirs.profiler = None  # Lightning would read what it has not recorded
    with pytest.raises(MisconfigurationException, match=message):
        train("sft", tmp_path, tiny_folder, chat_file, ProfilerCallback(), ProfilerCallback(tool="memory"))


def test_other_modules_are_sent_to_lightnings_profiler(tmp_path):
    with pytest.raises(MisconfigurationException, match="`BoringModel` has none. Use `trainer.profiler: pytorch`"):
        make_trainer(tmp_path, ProfilerCallback()).fit(BoringModel())


def test_hooks_are_told_without_the_phases_in_them():
    """A hook from 0 to 10 with a phase from 2 to 5, a hook within it, a loop around all, and a hook at 11."""
    record = StepRecord(
        step=1,
        start=0.0,
        end=20.0,
        phases=[Interval("gen", 2.0, 5.0)],
        actions=[
            Interval("run_training_batch", 0.0, 20.0),
            Interval("inner", 1.0, 3.0),
            Interval("hook", 0.0, 10.0),
            Interval("late", 11.0, 12.0),
        ],
    )

    assert record.outside == [Interval("hook", 0, 2), Interval("hook", 5, 10), Interval("late", 11, 12)]
    assert record.coverage == 11 / 20


def test_rows_are_means_over_steps():
    """By hand: 4 s a step, 1 s and 3 s of `gen`, 100 tokens a step."""
    metrics = {"perf/total_num_tokens": 100.0, "perf/mfu/infer": 0.5}
    records = [
        StepRecord(step=1, start=0, end=4, phases=[Interval("gen", 0, 1, 2**30)], actions=[], metrics=metrics),
        StepRecord(step=2, start=4, end=8, phases=[Interval("gen", 4, 7, 2**31)], actions=[], metrics=metrics),
    ]

    gen, hooks, other, step = summary_rows(records, {"gen": "infer"})

    assert gen == ("gen", 2.0, 0.5, 50.0, 0.5, 2.0)
    assert (hooks.seconds, other.seconds) == (0.0, 2.0)
    assert step == ("step", 4.0, 1.0, 25.0, None, 2.0)


def test_names_cant_break_the_page():
    record = StepRecord(step=1, start=0, end=1, phases=[Interval('<b>"', 0, 1)], actions=[])

    page = timeline_page([record], summary_rows([record], {}), "<i>")

    assert "<b>" not in page
    assert "<h1>&lt;i&gt;</h1>" in page
