"""Names of vLLM that no documentation promises are where `compat.vllm` looks for them."""

from __future__ import annotations

import importlib
import sys
from typing import get_args

import pytest
import torch

from verl_lightning.compat import vllm as compat


@pytest.mark.backend
@pytest.mark.filterwarnings("ignore")
def test_vllms_names_are_still_there():
    vllm = compat.import_in_process()
    heads = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    base = importlib.import_module("vllm.model_executor.layers.quantization.base_config").QuantizeMethodBase
    norms = importlib.import_module("vllm.model_executor.layers.layernorm")
    assert get_args(importlib.import_module("vllm.config.lora").MaxLoRARanks) == compat.LORA_RANKS
    assert issubclass(heads.UnquantizedEmbeddingMethod, base)
    assert callable(base.process_weights_after_loading)
    assert heads.ParallelLMHead.__name__ == "ParallelLMHead"
    assert issubclass(norms.RMSNorm, importlib.import_module("vllm.model_executor.custom_op").CustomOp)
    assert callable(importlib.import_module("vllm.config").get_current_vllm_config)
    form = importlib.import_module("vllm.sampling_params").StructuredOutputsParams
    assert compat.guide_complaints(form(regex="[0-9]")) == []
    assert [text.partition(":")[0] for text in compat.guide_complaints(form(regex="[0-9"))] == ["xgrammar", "guidance"]
    assert vllm.__name__ == "vllm"


def test_the_thread_setter_is_put_back():
    own = torch.set_num_threads
    with compat.thread_setter_kept():
        torch.set_num_threads = None
    assert torch.set_num_threads is own


def test_flashinfer_is_there_before_the_weights(tmp_path, monkeypatch):
    """It makes a table as it is imported, on the device that is torch's default then; vLLM's while it makes weights."""
    (tmp_path / "flashinfer.py").write_text("import torch\ntable = torch.zeros(16)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)

    compat.import_before_weights()

    assert sys.modules.pop("flashinfer").table.device.type == "cpu"
