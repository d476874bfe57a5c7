"""A run that is killed in all its phases leaves what one leaves that never was, bit for bit, and no process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.environments.worlds import write_counting_folder
from tests.processes import preload
from tests.resume.campaign import Campaign, command, files_of, train
from tests.resume.experiment import assert_same_state, read_metrics
from tests.resume.kill_points import Kill
from tests.resume.settings import write_settings
from tests.tiny import write_prompt_file
from verl_lightning.strategies.checkpoints import read_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
preload("tests.resume.campaign")

# Attempts go on behind the last step whose checkpoint is whole. Validations follow steps 2, 4 and 6; 6 is the last.
FIRST_SAVE = [
    Kill(action="]save_checkpoint", how="half"),
    Kill(action="]save_checkpoint", how="change", count=3),
]
PHASES = [
    Kill(action="dataloader_next"),
    Kill(action="]update_weights", how="within", count=4),
    Kill(action="]gen", how="within", count=4),
    Kill(action="]reward"),
    Kill(action="]old_log_prob", how="within", count=4),
    Kill(action="]ref"),
    Kill(action="]values", how="stop"),
    Kill(action="]adv"),
    Kill(action="]update_actor", how="within", count=4),
    Kill(action="]metrics"),
    Kill(action="]save_checkpoint", how="stop"),
    Kill(action="PPOModule.on_validation_batch_start"),
]
WRITES = [
    Kill(action="PPOModule.on_validation_epoch_end", how="change", count=2),
    Kill(action="HFCheckpoint on_validation_end", how="change", count=11),
    Kill(action="PPOModule.on_train_batch_end", how="torn"),
]
BETWEEN = [
    Kill(action="configure_model"),
    Kill(action="]update_weights", how="stop"),
    Kill(action="]gen", how="stop"),
    Kill(action="]reward", how="stop"),
    Kill(action="]adv", how="change", count=5),
    Kill(action="]update_critic", how="stop", nth=2),
    Kill(action="optimizer_step", how="stop"),
    Kill(action="PPOModule.on_validation_start"),
    Kill(action="HFCheckpoint on_validation_end", how="change", count=6),
    Kill(action="PPOModule.on_validation_end"),
]
END = [
    Kill(action="HFCheckpoint on_train_end", how="change", count=6),
    Kill(action="PPOModule.teardown"),
]
ALONE = [*FIRST_SAVE, *PHASES, *WRITES, *BETWEEN, *END]
OF_RANKS = [kill for kill in PHASES if kill.action not in ("]ref", "]values")]  # they score as the old policy does
TOGETHER = [FIRST_SAVE[0], *(replace(kill, rank=number % 2) for number, kill in enumerate(OF_RANKS)), *WRITES]
# Where `fsdp` saves in the background, as the next step begins: all that is otherwise than where it does not.
AROUND = ("dataloader_next", "]gen", "]save_checkpoint", "PPOModule.on_validation_batch_start")
BEHIND = [FIRST_SAVE[0], *(kill for kill in TOGETHER[1:] if kill in WRITES or kill.action in AROUND)]
STRATEGIES = {"ddp": TOGETHER, "fsdp": TOGETHER, "fsdp in the background": BEHIND}


def test_there_are_as_many_kills_as_promised():
    """In nine phases under each strategy; those that save in the background are `fsdp` too."""
    assert len(ALONE) + sum(map(len, STRATEGIES.values())) >= 60
    for kills in (ALONE, TOGETHER):
        assert len({kill.action for kill in kills if kill.action.startswith("]") or "loader" in kill.action}) >= 9


def assert_same_runs(ours: Path, theirs: Path) -> None:
    """All that two runs leave."""
    left, right = (read_checkpoint(run / "checkpoints/last.ckpt", weights_only=True) for run in (ours, theirs))
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "kl_coef", "global_step"):
        assert_same_state(left[key], right[key], key)
    assert read_metrics(ours) == read_metrics(theirs)
    found, expected = files_of(ours), files_of(theirs)
    assert sorted(found) == sorted(expected)
    assert [name for name in found if found[name] != expected[name]] == []


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """Three steps of prompts."""
    return write_prompt_file(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", num_rows=12)


def test_one_process_and_an_engine_beside_it(tmp_path, tiny_folder, prompts):
    runs = Campaign(folder=tmp_path, attempt=train, arguments=("auto", tiny_folder, prompts))
    assert_same_runs(runs.run("killed", ALONE), runs.run("whole"))


@pytest.mark.parametrize(("strategy", "kills"), STRATEGIES.items(), ids=STRATEGIES)
def test_two_ranks(tmp_path, tiny_folder, prompts, strategy, kills):
    """In turn one of them dies; the other follows, as torchrun has it. Under fsdp within episodes."""
    model = write_counting_folder(tmp_path / "model") if strategy == "fsdp" else tiny_folder
    runs = Campaign(folder=tmp_path, attempt=train, arguments=(strategy, model, prompts), ranks=[2])
    assert_same_runs(runs.run("killed", kills), runs.run("whole"))


def test_verl_fit_and_its_wandb_run(tmp_path, tiny_folder, prompts):
    write_settings(tmp_path / "ppo.yaml", model=tiny_folder, prompts=prompts)
    words = ["--config", "../ppo.yaml", "--ckpt_path", "auto", "--trainer.max_steps", "5"]
    words += ["--trainer.logger+=verl_lightning.loggers.ResumableCSVLogger", "--trainer.callbacks+=ResumeWandb"]
    words += ["--trainer.logger+=WandbLogger", "--trainer.logger.offline=true", "--trainer.logger.save_dir=."]
    words += ["--rollout.val_sampling.max_new_tokens", "4", "--trainer.val_check_interval", "2"]
    kills = [replace(FIRST_SAVE[0], nth=2), WRITES[-1]]
    runs = Campaign(folder=tmp_path, attempt=command, arguments=words)

    assert_same_runs(runs.run("killed", kills), runs.run("whole"))

    folders = [path.name.rpartition("-")[2] for path in tmp_path.glob("killed/wandb/offline-run-*")]
    assert (len(folders), len(set(folders))) == (len(kills) + 1, 1)
