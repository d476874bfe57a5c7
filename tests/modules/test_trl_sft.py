"""Fifty steps of SFT beside TRL's trainer on the same tokens: ``pytest -m oracle``, where TRL is installed.

Written against TRL 1.16.0, with a weight decay that shows: without the groups of norms and biases losses drift apart.
"""

from __future__ import annotations

import json

import pytest

from tests.modules.test_trl_preferences import BATCH, SETTINGS, their_steps
from tests.runs import Recorder, make_chats, make_model_config, make_sft, make_trainer
from verl_lightning.models.config import OptimConfig

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
STEPS = 50


def test_fifty_steps_are_those_of_trl(tmp_path, tiny_folder, monkeypatch):
    questions = [f"{index % 7}{index:03d}" for index in range(STEPS * BATCH)]
    rows = [
        {
            "prompt": [{"role": "user", "content": f"sort {question}"}],
            "completion": [{"role": "assistant", "content": "".join(sorted(question))[: 1 + index % 4]}],
        }
        for index, question in enumerate(questions)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setitem(SETTINGS, "max_steps", STEPS)
    theirs = their_steps("SFT", tiny_folder, rows, tmp_path, weight_decay=0.5)

    recorder, actor = Recorder(), make_model_config(tiny_folder, optim=OptimConfig(lr=1e-3, weight_decay=0.5))
    data = make_chats(tmp_path / "rows.jsonl", batch_size=BATCH, shuffle=False)
    make_trainer(tmp_path, recorder, max_steps=STEPS).fit(make_sft(tiny_folder, actor=actor), datamodule=data)

    expected = [step["loss"] for step in theirs]
    assert recorder.column("train/loss") == pytest.approx(expected, rel=1e-5, abs=1e-5)
