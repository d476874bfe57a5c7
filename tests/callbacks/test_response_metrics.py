"""Metrics of the user's measure validation responses for each data source, and decide when a run stops."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torchmetrics import MeanMetric
from torchmetrics.functional.text import char_error_rate
from torchmetrics.text import CharErrorRate

from tests.callbacks.conftest import EACH_STEP
from tests.environments.worlds import Counting
from tests.runs import Recorder, make_ppo, make_prompts, make_rollout, make_trainer
from verl_lightning.callbacks import ResponseMetrics


class Heard(Callback):
    """Keeps responses and ground truths of the last validation by data source."""

    def on_validation_start(self, *args):
        self.found = defaultdict(list)

    def on_validation_batch_end(self, trainer, module, outputs, batch, *args):
        prompts = batch.rollout.prompt_index.tolist()
        for prompt, text in zip(prompts, outputs["reward_result"].responses, strict=True):
            row = batch.rows[prompt]
            self.found[row["data_source"]].append((text, row["reward_model"]["ground_truth"]))


@pytest.fixture
def two_sources(tmp_path, prompt_file):
    """Twelve prompts of two data sources."""
    rows = [json.loads(line) for line in prompt_file.read_text().splitlines()[:12]]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({**row, "data_source": "ab"[n % 2]}) + "\n" for n, row in enumerate(rows)))
    return path


@pytest.mark.parametrize("environment", [None, Counting])
def test_each_data_source_has_its_metric(tmp_path, tiny_folder, two_sources, environment):
    recorder, heard = Recorder(), Heard()
    stop = EarlyStopping("val/a/cer", mode="min", patience=1, min_delta=1000.0)
    saves = ModelCheckpoint(tmp_path, "best", monitor="val/b/cer", mode="min")
    metrics = [ResponseMetrics({"cer": CharErrorRate()}), ResponseMetrics({"mean": MeanMetric()}, of="rewards")]
    rollout = make_rollout(max_new_tokens=20, environment=environment)
    options = {"enable_checkpointing": True, "max_steps": 5, **EACH_STEP}
    trainer = make_trainer(tmp_path, rollout, *metrics, heard, recorder, stop, saves, **options)

    trainer.fit(make_ppo(tiny_folder), make_prompts(two_sources, two_sources, val_batch_size=5))

    last = recorder.validations[-1]
    assert trainer.global_step == 2
    for source, said in heard.found.items():
        expected = char_error_rate(*map(list, zip(*said, strict=True)))
        assert last[f"val/{source}/cer"] == pytest.approx(float(expected))
    assert set(heard.found) == {"a", "b"}
    assert last["val/mean"] == pytest.approx(last["val/reward"])
    assert float(saves.best_model_score) == pytest.approx(min(each["val/b/cer"] for each in recorder.validations))


def test_a_monitor_that_nothing_logs_is_still_refused(tmp_path, tiny_folder, prompt_file):
    stop, metrics = EarlyStopping("val/a/crr"), ResponseMetrics({"cer": CharErrorRate()})

    with pytest.raises(MisconfigurationException, match="`monitor: val/a/crr`, which nothing logs"):
        make_trainer(tmp_path, make_rollout(), metrics, stop).fit(
            make_ppo(tiny_folder), make_prompts(prompt_file, prompt_file)
        )


@pytest.mark.parametrize(("metrics", "of", "message"), [({}, "texts", "no metric"), ({"a": 1}, "text", "got `text`")])
def test_metrics_that_mean_nothing_are_refused(metrics, of, message):
    with pytest.raises(ValueError, match=message):
        ResponseMetrics(metrics, of)
