"""An engine beside the trainer may die whenever it is asked something: the run goes on with the same numbers."""

from __future__ import annotations

import pytest
from lightning.pytorch import seed_everything

from tests.processes import on_ranks
from tests.rollout.mortal_engine import MortalBeside
from tests.runs import Recorder, make_ppo, make_trainer
from tests.runs import make_prompts as make_prompt_data
from verl_lightning.callbacks import HFRollout
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.strategies import STRATEGIES

pytestmark = pytest.mark.filterwarnings("ignore:the engine's process:UserWarning")

METRICS = ("critic/score/mean", "actor/grad_norm", "rollout/canary_gap")
# In a run, each step sends weights, samples the canary (4 answers), drops the cache, and samples 16 answers.
DEATHS = {
    "as it starts": ["start 0"],
    "as its successor starts": ["start is done 0", "start 1", "start 2"],
    "before it gets weights": ["load_weights 0"],
    "with half of its weights": ["weight 7"],
    "when it has its weights": ["load_weights is done 1"],
    "as its successor gets its weights": ["generate 1", "load_weights 1", "weight 45"],
    "as the canary is asked": ["generate 2"],
    "with half of the canary's answers": ["answer 2"],
    "after the canary's answers": ["generate is done 0"],
    "as it drops its cache": ["drop_caches 1"],
    "after the canary": ["drop_caches is done 1"],
    "with half of its answers": ["answer 10"],
    "between two steps": ["generate is done 1"],
}


def fit(folder, model, prompts, deaths=(), limit=9, **options):
    """The metrics of a run's steps, whose engines die at some events."""
    seed_everything(0, verbose=False)
    sampling = SamplingConfig(num_samples=4, max_new_tokens=6)
    placement = MortalBeside(folder=folder, deaths=deaths, max_restarts=limit)
    rollout = HFRollout(sampling, sampling, placement=placement)
    recorder = Recorder()
    make_trainer(folder, rollout, recorder, **options).fit(make_ppo(model), make_prompt_data(prompts))
    return {name: recorder.column(name) for name in METRICS}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_folder, prompt_file):
    return fit(tmp_path_factory.mktemp("undisturbed"), tiny_folder, prompt_file)


@pytest.mark.parametrize("deaths", DEATHS.values(), ids=DEATHS)
def test_a_run_goes_on_exactly(tmp_path, tiny_folder, prompt_file, undisturbed, deaths):
    with pytest.warns(UserWarning, match="A new one takes its place") as warnings:
        disturbed = fit(tmp_path, tiny_folder, prompt_file, deaths, limit=len(deaths))

    assert disturbed == undisturbed
    assert max(disturbed["rollout/canary_gap"]) < 1e-5
    assert sum("takes its place" in str(warning.message) for warning in warnings) == len(deaths)


def test_a_run_ends_when_engines_die_more_often_than_they_may(tmp_path, tiny_folder, prompt_file):
    with pytest.raises(RuntimeError, match=r"engines died 3 times, but `rollout.placement.max_restarts` is 2"):
        fit(tmp_path, tiny_folder, prompt_file, ["start 0", "start 1", "start 2"], limit=2)


def fit_rank(folder, model, prompts, deaths):
    return fit(folder, model, prompts, deaths, limit=100, strategy=STRATEGIES["fsdp"](), devices=2)


def test_ranks_wait_for_one_whose_engine_dies(tmp_path, tiny_folder, prompt_file):
    """Weights come from all ranks: each must send its part whenever one engine needs them anew."""
    moments = ["start 0", "start 1", "weight 7", "load_weights is done 2", "generate 3", "load_weights 5"]
    quiet = on_ranks(2, fit_rank, tmp_path / "quiet", tiny_folder, prompt_file, [])
    disturbed = on_ranks(2, fit_rank, tmp_path / "disturbed", tiny_folder, prompt_file, moments)

    assert disturbed == quiet
