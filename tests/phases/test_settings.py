"""Phases of a command line: what becomes of their settings, and what is refused before anything is imported."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from verl_lightning.cli.phase_settings import split_phases
from verl_lightning.launch.driver import refuse_phases
from verl_lightning.submit.run import read_run

SFT = {"model": {"class_path": "SFTModule", "init_args": {"actor": {"path": "base"}}}, "trainer": {"max_steps": 2}}
GRPO = {"config": "grpo", "model": {"init_args": {"actor": {"path": "phase:sft"}}}}
TWO = {"trainer": {"devices": 2}, "phases": {"sft": SFT, "grpo": GRPO}}


def split(tmp_path, settings, *flags, command="fit"):
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return split_phases([command, "--config", str(path), *flags])


def test_each_phase_has_the_shared_settings_its_files_its_own_and_its_flags(tmp_path):
    flags = ["--name", "first", "--phases.grpo.trainer.max_steps", "5", "--phases.sft.seed_everything=3"]
    sft, grpo = split(tmp_path, TWO, *flags)

    with grpo.words({"sft": "/models/sft"}) as words:
        files = [yaml.safe_load(Path(word).read_text()) for word in words if word.endswith(".yaml")]

    assert [sft.flags, grpo.flags] == [
        ["--name", "first", "--seed_everything=3"],
        ["--name", "first", "--trainer.max_steps", "5"],
    ]
    assert [file.get("model", {}).get("class_path") for file in files] == [None, "PPOModule", None]
    assert files[0] == {"trainer": {"devices": 2}}
    assert files[2] == {"model": {"init_args": {"actor": {"path": "/models/sft"}}}}


def test_a_command_line_without_phases_is_left_alone(tmp_path):
    assert split(tmp_path, SFT) is None
    assert split(tmp_path, {"model": {"init_args": {"phases:": 1}}}) is None


@pytest.mark.parametrize(
    ("phases", "flags", "message"),
    [
        ({"sft": SFT, "grpo": {"config": "grpo"}}, [], "`phases.sft` ends in a model from which no later phase begins"),
        ({"grpo": GRPO, "sft": SFT}, [], "`phases.grpo`: `phase:sft` is no earlier phase"),
        ({"sfd": SFT, "grpo": GRPO}, [], "`phase:sft` is no earlier phase. Did you mean `sfd`"),
        ({"s/t": SFT}, [], "`phases.s/t` is no name of a phase"),
        ({"sft": 3}, [], "`phases.sft` must be settings, such as `trainer`, got 3"),
        ([SFT], [], "`phases` must hold the settings of each phase below its name"),
        ({"sft": SFT | {"config": "nowhere"}}, [], "`phases.sft.config`: `--config nowhere` is neither a file"),
        (
            TWO["phases"],
            ["--phases.gpo.name", "a"],
            "`--phases.gpo.name` is an option of no phase. Did you mean",
        ),
        (TWO["phases"], ["--print_config"], "say `--phases.sft.print_config`"),
    ],
)
def test_phases_that_do_not_fit_are_refused(tmp_path, phases, flags, message):
    with pytest.raises(ValueError, match=message):
        split(tmp_path, {"phases": phases}, *flags)


def test_phases_are_for_fits_that_ray_does_not_start(tmp_path):
    with pytest.raises(ValueError, match="`phases` are for `fit`"):
        split(tmp_path, TWO, command="validate")
    with pytest.raises(ValueError, match="`verl-fit ray` trains one configuration so far"):
        refuse_phases(split(tmp_path, TWO))


def test_a_job_of_slurm_is_read_by_its_first_phase(tmp_path):
    data = {"data": {"class_path": "ChatDataModule", "init_args": {"train_files": "chats.jsonl"}}}
    split(tmp_path, {"trainer": {"devices": 2}, "phases": {"sft": SFT | data, "grpo": GRPO}})

    run = read_run(["--config", str(tmp_path / "two.yaml")], None)

    assert run.reading.get("trainer.devices") == 2
    assert run.name.startswith("two-2")
