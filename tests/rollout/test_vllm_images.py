"""vLLM reads the same images as the HF engine. Of the families, vLLM reads Idefics3 without torchvision."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.testing import assert_close

from tests.rollout.vllm_parts import make_hf_engine, make_vllm_engine
from tests.runs import Recorder, make_model_config, make_ppo, make_prompts, make_trainer
from tests.vision.asking_images import requests_with_images
from tests.vision.tiny_vision import squares, write_vision_folder
from verl_lightning.callbacks import VLLMRollout
from verl_lightning.callbacks.placement import Beside
from verl_lightning.faults import RunError
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.completions import answer, wait_for

pytestmark = [pytest.mark.backend, pytest.mark.filterwarnings("ignore")]  # vLLM warns of many things


def test_vllm_samples_what_the_hf_engine_samples_before_and_after_a_sync(tmp_path):
    folder = write_vision_folder(tmp_path, "idefics3", wide=True)
    hf, vllm, requests = make_hf_engine(folder), make_vllm_engine(folder), requests_with_images(folder, "idefics3")
    vllm.start(torch.device("cpu"))
    try:
        for version in (1, 2):
            vllm.load_weights([(name, w.detach()) for name, w in hf._running.named_parameters()], version)
            for one, other in zip(*(wait_for(answer(e.generate, requests)) for e in (hf, vllm)), strict=True):
                assert one.token_ids == other.token_ids
                assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-4, rtol=0)
            for name, weight in hf._running.named_parameters():
                if "vision" in name or "connector" in name:  # a cached image would be the old tower's
                    weight.mul_(1.5)
        longer = dataclasses.replace(requests[0], prompt_ids=[*requests[0].prompt_ids[:1], *requests[0].prompt_ids])
        with pytest.raises(RunError, match="the two write out images otherwise"):
            wait_for(answer(vllm.generate, [longer]))
    finally:
        vllm.stop()


@pytest.mark.parametrize("placement", [None, Beside()])
def test_a_run_with_vllm_samples_what_it_scores_though_its_tower_learns(tmp_path, placement):
    """The trainer's log-probs are those of vLLM after each step, so no image was cached from an old tower."""
    seed_everything(0, verbose=False)
    folder, recorder = write_vision_folder(tmp_path / "model", "idefics3", wide=True), Recorder()
    rows = []
    for index in range(8):
        squares(1 + index % 3, size=[(16, 16), (24, 16)][index % 2]).save(tmp_path / f"{index}.png")
        shown = {"prompt": "<image>count", "images": [f"{index}.png"]} if index % 4 else {"prompt": "no picture"}
        rows.append(json.dumps(shown | {"ground_truth": str(index % 3)}) + "\n")
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    sampling = SamplingConfig(num_samples=4, max_new_tokens=6)
    rollout = VLLMRollout(sampling, sampling, enforce_eager=True, placement=placement, canary_limit=1e-4)
    module = make_ppo(folder, actor=make_model_config(folder, lr=1e-2, train_vision_tower=True))
    trainer = make_trainer(tmp_path, rollout, recorder)
    trainer.fit(module, datamodule=make_prompts(tmp_path / "rows.jsonl", max_prompt_length=40))

    assert len(recorder.steps) == 3
    assert max(recorder.column("rollout/canary_gap")) < 1e-4
    assert max(recorder.column("rollout_corr/abs_log_prob_gap")) < 1e-4
