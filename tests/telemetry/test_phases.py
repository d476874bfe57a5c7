"""Phases of PPO and SFT runs: what they add up to, and what Lightning's hooks tell."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.runs import Recorder, make_chats, make_ppo, make_prompts, make_rollout, make_sft, make_trainer
from verl_lightning.callbacks import ProfilerCallback
from verl_lightning.metrics import MetricTable
from verl_lightning.models.build import build_scorer
from verl_lightning.models.config import ModelConfig
from verl_lightning.telemetry.phases import PhaseClock, span_metrics
from verl_lightning.telemetry.speed import SQUARED_LENGTHS, Work, mfu, mfu_notice, scoring_work, training_work


class TokenCounter(Callback):
    """Counts the tokens of each batch."""

    def __init__(self):
        self.tokens = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.tokens.append(int(batch.attention_mask.sum()))


def test_a_step_lasts_from_its_first_phase_to_the_report(monkeypatch):
    moments = iter([0.0, 10.0, 12.0, 15.0, 16.0, 20.0, 20.0])  # an origin, two phases, the report and a new origin
    monkeypatch.setattr("verl_lightning.telemetry.phases.time", SimpleNamespace(perf_counter=lambda: next(moments)))
    clock = PhaseClock()
    clock.use(torch.device("cpu"))
    for _ in range(2):
        with clock.measure("gen"):
            pass

    spans = clock.take()

    assert [(span.name, span.seconds) for span in spans] == [("step", 10.0), ("gen", 2.0), ("gen", 1.0)]
    metrics = span_metrics(spans, steps=2)
    assert metrics["timing_s/gen"].value == 1.5
    assert metrics.keys() == {"timing_s/step", "timing_s/gen"}
    assert clock.take() == []


def test_the_slowest_rank_counts():
    clock = PhaseClock()
    with clock.measure("gen"):
        pass
    table = MetricTable()
    table.add(span_metrics(clock.take()))

    def gather(mine):
        return [mine, {"timing_s/gen": ("max", 7.0, 1.0)}]

    assert table.reduce(gather)["timing_s/gen"] == 7.0


def test_a_phase_that_fails_is_closed():
    clock = PhaseClock()
    with pytest.raises(ZeroDivisionError), clock.measure("gen"):
        _ = 1 / 0

    with clock.measure("reward") as span:
        assert span.depth == 0
    assert [span.name for span in clock.take()] == ["step", "gen", "reward"]


def test_sft_logs_what_its_phases_took(tmp_path, tiny_folder, chat_file):
    recorder = Recorder()
    trainer = make_trainer(tmp_path, recorder, max_steps=2, log_every_n_steps=1, accumulate_grad_batches=2)

    trainer.fit(make_sft(tiny_folder), datamodule=make_chats(chat_file))

    last = {name: float(value) for name, value in trainer.callback_metrics.items()}
    phases = last["timing_s/forward_backward"] + last["timing_s/optimizer"]
    assert 0.5 * last["timing_s/step"] < phases <= last["timing_s/step"]
    assert last["perf/throughput"] == pytest.approx(last["perf/total_num_tokens"] / last["timing_s/step"], rel=1e-4)
    assert SQUARED_LENGTHS not in last


def test_sft_reports_means_over_the_steps_that_are_not_logged(tmp_path, tiny_folder, chat_file):
    counter = TokenCounter()
    trainer = make_trainer(tmp_path, counter, max_steps=4, log_every_n_steps=4)

    trainer.fit(make_sft(tiny_folder), datamodule=make_chats(chat_file))

    assert float(trainer.callback_metrics["perf/total_num_tokens"]) == pytest.approx(sum(counter.tokens) / 4)


def test_writing_a_checkpoint_is_a_phase_of_the_next_step(tmp_path, tiny_folder, prompt_file):
    recorder = Recorder()
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    trainer = make_trainer(
        tmp_path, make_rollout(), saves, recorder, max_steps=2, enable_checkpointing=True, log_every_n_steps=1
    )

    trainer.fit(make_ppo(tiny_folder), datamodule=make_prompts(prompt_file))

    first, second = recorder.steps
    assert "timing_s/save_checkpoint" not in first
    assert second["timing_s/save_checkpoint"] > 0


def test_work_counts_weights_that_multiply(tiny_folder):
    """By hand: a look-up table multiplies nothing unless it is the output head too."""
    model = build_scorer(ModelConfig(path=str(tiny_folder)), "policy", trainable=True)
    config = model.backbone.config
    all_weights = sum(weight.numel() for weight in model.parameters())
    table = config.vocab_size * config.hidden_size
    looked_up = 0 if config.tie_word_embeddings else table

    forward, training = scoring_work("a", "p", model), training_work("a", "p", model)

    assert forward.per_token == 2 * (all_weights - looked_up)
    assert training.per_token == 3 * forward.per_token
    assert forward.per_pair == 4 * config.num_hidden_layers * config.hidden_size
    assert training.per_pair == 3 * forward.per_pair


def test_mfu_by_hand():
    """(10 * 100 + 2 * 500) operations in 4 s of 1000 possible ones a second."""
    metrics = {"timing_s/gen": 4.0, "perf/total_num_tokens": 100.0, SQUARED_LENGTHS: 500.0}

    shares = mfu(metrics, [Work("actor", "gen", 10.0, 2.0), Work("ref", "ref", 1.0, 1.0)], operations=1000.0)

    assert shares == {"perf/mfu/actor": 0.5}


def test_a_device_without_known_peak_says_so():
    assert mfu_notice(torch.device("cpu")) == (
        "`perf/mfu/*` is not logged: the peak of the CPU is not known to verl_lightning."
    )


class CountsCalls(Callback):
    """Enters an empty phase at the end of training."""

    calls = 0

    def on_train_end(self, trainer, pl_module):
        def count(frame, event, argument):
            self.calls += event in ("call", "c_call")

        sys.setprofile(count)
        with pl_module.phase("gen"):
            pass
        sys.setprofile(None)


@pytest.mark.parametrize("callbacks", [[], [ProfilerCallback(steps=[1], ranks=[0])]])
def test_a_phase_costs_little(tmp_path, tiny_folder, chat_file, callbacks):
    """With a profiler outside its window too; `benchmarks/metrics_cost.py` says what that is in microseconds."""
    counter = CountsCalls()

    trainer = make_trainer(tmp_path, *callbacks, counter, max_steps=2)
    trainer.fit(make_sft(tiny_folder), datamodule=make_chats(chat_file))

    assert 20 < counter.calls < 200
