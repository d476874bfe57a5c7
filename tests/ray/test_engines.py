"""Engines in Ray actors answer all callers as an engine of their own does, and outlive the death of an actor."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.processes import wait_until
from tests.ray.engine_processes import EngineKiller, engine_pids
from tests.rollout.asking import sample
from tests.rollout.conformance import CHECKS, ENDS, SAMPLING, Bench
from tests.rollout.test_hf_engine import make_engine, make_prompts
from tests.rollout.vllm_parts import make_prompts as make_conformance_prompts
from tests.runs import Recorder, make_ppo, make_trainer
from tests.runs import make_prompts as make_prompts_data
from tests.tiny import tiny_model
from tests.tolerances import assert_near
from tests.vision.tiny_vision import squares, write_vision_folder
from verl_lightning.algorithms.corrections.truncated_importance_sampling import TruncatedImportanceSampling
from verl_lightning.callbacks import HFRollout, RayRollout
from verl_lightning.launch.worker import is_mistake
from verl_lightning.models.config import ModelConfig
from verl_lightning.ray.actors import (
    ActorsLostError,
    RuntimeEnvironment,
    await_actors,
    start_actors,
    stop_actors,
)
from verl_lightning.ray.cluster import Demand
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.completions import answer, make_requests, wait_for
from verl_lightning.rollout.dispatcher import num_tokens
from verl_lightning.rollout.engine_actor import EngineActor
from verl_lightning.rollout.hf import HFEngine
from verl_lightning.rollout.ray_engines import Caller, RayEngines
from verl_lightning.rollout.stored_weights import store_weights

CPU = torch.device("cpu")
FIELDS = ("input_ids", "attention_mask", "response_mask", "rollout_log_probs", "is_truncated", "prompt_index")
starts_ray = pytest.mark.skipif(sys.platform != "linux", reason="starts a Ray cluster")


def assert_same_rollout(ours, theirs):
    for name in FIELDS:
        assert_near(getattr(ours, name), getattr(theirs, name))


def load(engines, seed, version=None):
    for engine in engines:
        engine.load_weights(list(tiny_model(seed=seed).named_parameters()), version or seed)


class Holder:
    """Holds CPUs."""

    def ready(self):
        pass


@pytest.mark.slow
@starts_ray
def test_a_replica_without_a_place_joins_when_there_is_one(joined_cluster, tiny_folder):
    """Of two nodes with five CPUs each, one is taken when the run begins."""
    import ray

    demand = Demand(option="holder", count=1, cpus=4.0)
    await_actors(holder := start_actors(Holder, demand), demand)
    wanted = Demand(option="rollout.num_replicas", count=2, cpus=4.0)
    engines, alone = RayEngines(make_engine(tiny_folder), wanted, at_least=1), make_engine(tiny_folder)
    sampling = SamplingConfig(num_samples=3, max_new_tokens=8)
    engines.start(CPU)
    load([alone, engines], seed=1)

    assert_same_rollout(sample(engines, make_prompts(), sampling), sample(alone, make_prompts(), sampling))
    stop_actors(holder)

    def has_joined():
        load([engines], seed=1, version=2)
        calls = [actor.__ray_call__.remote(lambda self: self._version) for actor in engines._actors]
        return ray.get(calls) == [2, 2]

    wait_until(has_joined)
    assert_same_rollout(sample(engines, make_prompts(), sampling), sample(alone, make_prompts(), sampling))
    engines.stop()


@pytest.fixture(scope="module")
def callers(joined_cluster, tiny_folder):
    """Two replicas, and three callers that share them."""
    engine = HFEngine(ModelConfig(path=str(tiny_folder)), eos_token_ids=[1], pad_token_id=0)
    demand = Demand(option="rollout.num_replicas", count=2, cpus=1.0)
    told = []
    sends = [lambda value: told.append(value) or value] + [lambda _: told[0]] * 2
    parts = [Caller(rank=rank, broadcast=send) for rank, send in enumerate(sends)]
    engines = [RayEngines(engine, demand, caller=part) for part in parts]
    for each in engines:
        each.start(CPU)
    yield engines
    for each in engines:
        each.stop()


@pytest.mark.slow
@starts_ray
@pytest.mark.parametrize("seed", [1, 2])  # the newest weights count
def test_two_replicas_answer_three_callers_as_their_own_engines_would(callers, tiny_folder, seed):
    sampling = SamplingConfig(num_samples=3, max_new_tokens=8)
    prompts = [make_prompts(), make_prompts(rows=[3]), make_prompts(rows=[0, 2])]
    alone = make_engine(tiny_folder)
    load([alone, *callers], seed)

    with ThreadPoolExecutor(3) as threads:
        rollouts = list(threads.map(lambda caller, asked: sample(caller, asked, sampling), callers, prompts))

    for rollout, asked in zip(rollouts, prompts, strict=True):
        assert_same_rollout(rollout, sample(alone, asked, sampling))


@pytest.fixture(scope="module")
def bench(joined_cluster, tiny_folder):
    engine = HFEngine(
        ModelConfig(path=str(tiny_folder)), eos_token_ids=ENDS, pad_token_id=0, deadline=1.0, rereads=True
    )
    engines = RayEngines(engine, Demand(option="rollout.num_replicas", count=2, cpus=1.0), grace=9.0)
    engines.start(CPU)
    yield Bench(tiny_folder, engines, lambda: engine_pids(engines))
    engines.stop()


@pytest.mark.slow
@starts_ray
def test_a_hung_replica_is_started_anew_and_another_one_asked(bench):
    requests = make_requests(*make_conformance_prompts((9, 4, 7, 12), num_samples=16), SAMPLING)
    expected = wait_for(answer(bench.engine.generate, requests))
    os.kill(bench.pids()[0], signal.SIGSTOP)

    completions = wait_for(answer(bench.engine.generate, requests))

    assert [each.token_ids for each in completions] == [each.token_ids for each in expected]


@pytest.mark.slow
@starts_ray
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_replicas_do_what_every_engine_does(bench, check):
    if "hung" in check.__name__:
        bench.engine.grace = 1.0
    check(bench)


@pytest.mark.slow
@starts_ray
def test_a_run_one_step_ahead_is_the_same_with_engines_that_die(joined_cluster, tiny_folder, prompt_file, tmp_path):
    sampling = SamplingConfig(num_samples=4, max_new_tokens=6)
    inner = HFRollout(sampling, sampling)
    recorders, killer = [Recorder(), Recorder()], EngineKiller(step=2)
    rollouts = [HFRollout(sampling, sampling, max_staleness=1), RayRollout(inner, num_replicas=2, max_staleness=1)]

    for rollout, recorder in zip(rollouts, recorders, strict=True):
        trainer = make_trainer(tmp_path, rollout, recorder, killer, max_steps=5)
        trainer.fit(make_ppo(tiny_folder, corrections=[TruncatedImportanceSampling()]), make_prompts_data(prompt_file))

    assert killer.killed is not None
    assert recorders[1].column("rollout/staleness/mean") == [0, 1, 1, 1, 1]
    for name in ("critic/score/mean", "response_length/mean", "actor/grad_norm", "rollout_corr/abs_log_prob_gap"):
        assert_near(recorders[0].column(name), recorders[1].column(name), rel=1e-3)


@pytest.mark.slow
@starts_ray
def test_replicas_see_the_images_of_prompts(joined_cluster, tmp_path):
    """Two prompts of the same words about two images, which the trainer and the engines score alike."""
    folder, recorder = write_vision_folder(tmp_path / "model", "qwen2_5_vl"), Recorder()
    for count in (1, 5):
        squares(count).save(tmp_path / f"{count}.png")
    row = '{"prompt": "<image>count", "images": ["%d.png"], "ground_truth": "1"}\n'
    (tmp_path / "rows.jsonl").write_text(row % 1 + row % 5)
    sampling = SamplingConfig(num_samples=4, max_new_tokens=6)
    rollout = RayRollout(HFRollout(sampling, sampling, canary_limit=1e-5), num_replicas=1)
    trainer = make_trainer(tmp_path, rollout, recorder, max_steps=1)
    trainer.fit(make_ppo(folder), make_prompts_data(tmp_path / "rows.jsonl", prompts_per_step=2))

    assert max(recorder.column("rollout_corr/abs_log_prob_gap")) < 1e-5


@pytest.mark.slow
@starts_ray
def test_a_caller_with_other_weights_than_the_newest_is_refused(callers):
    load(callers[:2], seed=1, version=9)

    with pytest.raises(RuntimeError, match=r"has version \d of the weights, but \d was asked for"):
        sample(callers[2], make_prompts(), SamplingConfig(num_samples=3, max_new_tokens=8))
    load(callers[2:], seed=1, version=9)


@pytest.mark.slow
@starts_ray
def test_a_caller_whose_engines_are_gone_may_start_again(callers):
    callers[0].stop()

    with pytest.raises(ActorsLostError) as lost:
        sample(callers[1], make_prompts(), SamplingConfig(num_samples=3, max_new_tokens=8))

    assert not is_mistake(lost.value)
    assert is_mistake(SystemExit(2))


@pytest.mark.slow
@starts_ray
def test_a_replica_with_old_weights_loads_the_newest_before_it_answers(joined_cluster, tiny_folder):
    old, new = (list(tiny_model(seed=seed).named_parameters()) for seed in (1, 2))
    references = [store_weights(weights) for weights in (old, new)]
    sampling = SamplingConfig(num_samples=3, max_new_tokens=8)
    alone = make_engine(tiny_folder)
    alone.load_weights(new, 1)
    replica = EngineActor(make_engine(tiny_folder), CPU, RuntimeEnvironment.here())
    replica.load_weights(1, references[0])

    requests = make_requests(*make_prompts(), sampling)

    completions = asyncio.run(replica.generate(2, references[1], requests))

    assert {completion.weights_version for completion in completions} == {2}
    expected = wait_for(answer(alone.generate, requests))
    assert [completion.token_ids for completion in completions] == [each.token_ids for each in expected]


def test_samples_of_a_prompt_count_its_tokens_once():
    requests = make_requests(*make_prompts(rows=[1, 2]), SamplingConfig(num_samples=3, max_new_tokens=8))

    assert num_tokens(requests) == (9 + 5) + 2 * 3 * 8
