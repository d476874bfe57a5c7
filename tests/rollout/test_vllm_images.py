"""vLLM reads the same images as the HF engine. Of the families, vLLM reads Idefics3 without torchvision."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from tests.rollout.vllm_parts import make_hf_engine, make_vllm_engine
from tests.vision.asking_images import requests_with_images
from tests.vision.tiny_vision import write_vision_folder
from verl_lightning.faults import RunError
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
