"""Weights on their way to engines in other processes; what needs GPUs is only checked against vLLM's types."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.rollout.asking import sample
from tests.rollout.vllm_parts import make_hf_engine, make_prompts, make_vllm_engine, weights_of, write_sharp_folder
from verl_lightning.compat.vllm import repack_output_heads
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.weight_transfer import (
    GPUSender,
    choose_transfer,
    chunks,
    decode_handles,
    describe,
    encode_handles,
)
from verl_lightning.rollout.worker import decode_info

CHUNK = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("trainer", "engine", "transfer"), [(None, None, "host"), (None, 0, "host"), (0, 1, "nccl"), (1, 1, "ipc")]
)
def test_the_fastest_possible_way_is_taken(trainer, engine, transfer):
    assert choose_transfer("auto", trainer_gpu=trainer, engine_gpu=engine) == transfer
    assert choose_transfer("host", trainer_gpu=trainer, engine_gpu=engine) == "host"


@pytest.mark.parametrize(("wanted", "trainer", "engine"), [("nccl", 1, 1), ("ipc", 0, 1), ("nccl", None, 0)])
def test_a_way_that_does_not_lead_there_is_refused(wanted, trainer, engine):
    with pytest.raises(MisconfigurationException, match=rf"`rollout.placement.transfer: {wanted}` can't send weights"):
        choose_transfer(wanted, trainer_gpu=trainer, engine_gpu=engine)


def test_a_vllm_that_imports_ray_for_ipc_goes_through_the_host_without_it(tmp_path, monkeypatch):
    folder = tmp_path / "vllm/distributed/weight_transfer"
    folder.mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").touch()
    (folder / "ipc_engine.py").write_text("import os\n\nimport ray\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)

    assert choose_transfer("auto", trainer_gpu=0, engine_gpu=0) == "host"
    with pytest.raises(MisconfigurationException, match="`rollout.placement.transfer: ipc` needs Ray"):
        choose_transfer("ipc", trainer_gpu=0, engine_gpu=0)


def test_weights_go_in_chunks_of_about_a_size():
    weights = [(name, torch.zeros(4)) for name in "abcde"]

    assert [list(chunk) for chunk in chunks(weights, 32)] == [["a", "b"], ["c", "d"], ["e"]]
    assert [list(chunk) for chunk in chunks(weights, 1)] == [["a"], ["b"], ["c"], ["d"], ["e"]]


def test_a_chunk_is_described_and_its_handles_cross_as_text():
    shape = (torch.Size([2, 3]), (3, 1), 0, torch.UntypedStorage, torch.bfloat16, 0, b"\x00\xffhandle", 12, 0, False)
    handles = [{"GPU-1": (torch.Tensor, *shape, b"\xfe", 0, b"", True)}, {"GPU-1": (torch.nn.Parameter, None)}]

    message = json.loads(json.dumps(describe(CHUNK) | {"ipc_handles": encode_handles(handles)}))

    assert describe(CHUNK) == {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], [4]]}
    assert decode_info(message) == describe(CHUNK) | {"ipc_handles": handles}
    assert decode_handles(encode_handles(handles)) == handles


@pytest.mark.backend
@pytest.mark.filterwarnings("ignore")
def test_vllm_takes_our_messages():
    from vllm.distributed.weight_transfer import ipc_engine, nccl_common, nccl_engine

    nccl_engine.NCCLWeightTransferUpdateInfo(**describe(CHUNK))
    ipc_engine.IPCWeightTransferUpdateInfo(**describe(CHUNK), ipc_handles=[{"GPU-1": ()}, {"GPU-1": ()}])
    ipc_engine.IPCWeightTransferInitInfo(**GPUSender("ipc", torch.device("cuda", 0)).invitation())
    invitation = GPUSender("nccl", torch.device("cuda", 0)).invitation()
    assert nccl_common.NCCLWeightTransferInitInfo(**invitation).world_size == 2
    assert callable(nccl_common.trainer_init)


@pytest.mark.backend
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_engine_uses_what_vllms_own_transfer_brings(tmp_path):
    """All of vLLM's steps but the way through a GPU, in whose place weights are fetched by their names."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    folder = write_sharp_folder(tmp_path / "sharp")
    weights = dict(weights_of(AutoModelForCausalLM.from_pretrained(folder)))

    class Fetches(NCCLWeightTransferEngine):
        def init_transfer_engine(self, init_info):
            self.met = init_info.world_size

        def update_weights(self, update_info):
            info = self.parse_update_info(update_info)
            self.model.load_weights([(name, weights[name]) for name in info.names])

    WeightTransferEngineFactory.register_engine("fetches", Fetches)
    engine = make_vllm_engine(folder, transfer="fetches")
    engine.start(torch.device("cpu"))
    engine.join_trainer(GPUSender("nccl", torch.device("cuda", 0)).invitation())
    engine.start_weights()
    for chunk in chunks(weights.items(), 2**12):
        engine.receive_weights(describe(chunk))
    engine.finish_weights(1)
    engine._running.apply_model(repack_output_heads)  # only on CPUs

    greedy = SamplingConfig(max_new_tokens=12, temperature=0.0)
    ours, expected = (sample(each, make_prompts(), greedy) for each in (engine, make_hf_engine(folder)))
    engine.stop()
    assert_close(ours.input_ids, expected.input_ids)
    assert_close(ours.rollout_log_probs, expected.rollout_log_probs, atol=1e-4, rtol=0)
