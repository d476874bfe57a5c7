"""Engines in Ray actors answer as one engine does, and outlive the death of an actor."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import psutil
import pytest
import torch
from torch.testing import assert_close

from tests.rollout.test_hf_engine import make_engine, make_prompts
from tests.tiny import tiny_model
from verl_lightning.models.config import ModelConfig
from verl_lightning.ray.actors import Home
from verl_lightning.ray.cluster import Demand
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.hf import HFEngine
from verl_lightning.rollout.joining import join_rollouts
from verl_lightning.rollout.process import buckets
from verl_lightning.rollout.ray_engines import EngineActor, RayEngines, num_tokens, split_prompts

CPU = torch.device("cpu")
FIELDS = ("input_ids", "attention_mask", "response_mask", "rollout_log_probs", "is_truncated", "prompt_index")
starts_ray = pytest.mark.skipif(sys.platform != "linux", reason="starts a Ray cluster")


def assert_same_rollout(ours, theirs):
    for name in FIELDS:
        assert_close(getattr(ours, name), getattr(theirs, name))


def start_replicas(folder, count=2):
    engine = HFEngine(ModelConfig(path=str(folder)), eos_token_ids=[1], pad_token_id=0)
    engines = RayEngines(engine, Demand(option="rollout.num_replicas", count=count, cpus=1.0), pad_token_id=0)
    engines.start(CPU)
    return engines


def kill_an_actor_at_work(killed):
    """SIGKILL for the first actor that is seen to sample; its process is put into the list."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in psutil.process_iter(["name", "cmdline"]):
            if (process.info["cmdline"] or [""])[0].startswith("ray::EngineActor.generate"):
                os.kill(process.pid, signal.SIGKILL)
                killed.append(process.pid)
                return
        time.sleep(0.02)


@pytest.mark.slow
@starts_ray
def test_replicas_sample_what_one_engine_samples(joined_cluster, tiny_folder):
    sampling = SamplingConfig(num_samples=3, max_new_tokens=8)
    alone, replicas = make_engine(tiny_folder), start_replicas(tiny_folder)
    for seed in (1, 2):  # the newest weights count
        weights = list(tiny_model(seed=seed).named_parameters())
        alone.load_weights(weights)
        replicas.load_weights(weights)

        assert_same_rollout(replicas.generate(make_prompts(), sampling), alone.generate(make_prompts(), sampling))
    replicas.stop()


@pytest.mark.slow
@starts_ray
def test_a_killed_engine_is_replaced_and_its_prompts_answered(joined_cluster, tiny_folder):
    sampling = SamplingConfig(num_samples=3, max_new_tokens=300)
    alone, replicas = make_engine(tiny_folder), start_replicas(tiny_folder)
    weights = list(tiny_model(seed=1).named_parameters())
    alone.load_weights(weights)
    replicas.load_weights(weights)
    killed = []
    killer = threading.Thread(target=kill_an_actor_at_work, args=(killed,))

    killer.start()
    rollout = replicas.generate(make_prompts(), sampling)
    killer.join()

    assert killed
    assert_same_rollout(rollout, alone.generate(make_prompts(), sampling))
    replicas.stop()


@pytest.mark.slow
@starts_ray
def test_a_replica_with_old_weights_loads_the_newest_before_it_answers(joined_cluster, tiny_folder):
    import ray

    old, new = (list(tiny_model(seed=seed).named_parameters()) for seed in (1, 2))
    references = [[ray.put(message) for message in buckets(iter(weights))] for weights in (old, new)]
    sampling = SamplingConfig(num_samples=3, max_new_tokens=8)
    alone = make_engine(tiny_folder)
    alone.load_weights(new)
    replica = EngineActor(make_engine(tiny_folder), CPU, Home.here())
    replica.load_weights(1, references[0])

    version, rollout = replica.generate(2, references[1], make_prompts(), sampling)

    assert version == 2
    assert_same_rollout(rollout, alone.generate(make_prompts(), sampling))


def test_prompts_are_split_evenly_and_joined_again(tiny_folder):
    sampling = SamplingConfig(num_samples=3, max_new_tokens=8)
    engine = make_engine(tiny_folder)
    prompts = make_prompts()

    parts = split_prompts(prompts, 3)

    assert [len(part) for part in parts] == [1, 2, 2]
    assert num_tokens(parts[1], sampling) == (9 + 5) + 2 * 3 * 8
    assert [len(part) for part in split_prompts(prompts, 9)] == [1] * 5
    joined = join_rollouts([engine.generate(part, sampling) for part in parts], pad_token_id=0)
    assert_same_rollout(joined, engine.generate(prompts, sampling))


def test_shorter_parts_are_filled(tiny_folder):
    engine = make_engine(tiny_folder)
    short, long = (SamplingConfig(max_new_tokens=length) for length in (2, 5))
    parts = [engine.generate(make_prompts(num_samples=1, rows=[row]), s) for row, s in ((0, short), (1, long))]

    joined = join_rollouts(parts, pad_token_id=7)

    assert joined.response_mask.tolist() == [[True] * 2 + [False] * 3, [True] * 5]
    assert joined.response_ids[0, 2:].tolist() == [7] * 3
    assert joined.rollout_log_probs[0, 2:].tolist() == [0.0] * 3
    assert joined.prompt_index.tolist() == [0, 1]
