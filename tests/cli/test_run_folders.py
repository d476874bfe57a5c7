"""The one folder of a run: its name, its record, its report, and the list of all runs."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from tests.cli.test_runs import CHECKPOINTS
from tests.modules.test_run_lock import held
from tests.runs import run_folders
from verl_lightning.cli.lightning_cli import CLI
from verl_lightning.cli.runs import main as list_runs
from verl_lightning.run_records import RunRecord, read_record, runs_in, stem_of, timed_name, write_record

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


class Fail(Callback):
    """Ends a run with an error in its second step."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1:
            raise ValueError("enough")


def listed(capsys, *words: str) -> list[list[str]]:
    """The cells of each line of `verl-fit runs`."""
    capsys.readouterr()
    list_runs(words)
    return [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()]


def test_a_run_is_named_by_its_configuration_and_the_time(run, folder, caplog):
    with caplog.at_level(logging.INFO):
        run("--trainer.default_root_dir", "elsewhere", *CHECKPOINTS)

    ((path, record),) = runs_in(folder / "elsewhere")
    assert re.fullmatch(r"base-\d{8}-\d{6}", path.name)
    assert not (folder / "runs").exists()
    where = path.relative_to(folder)
    assert f"Run `{path.name}` begins.\n  curves: {where}/report.html\n  checkpoint: {where}/checkpoints" in caplog.text
    assert f"Run `{path.name}` ended after step 3: finished.\n  curves: {where}/report.html" in caplog.text
    assert f"checkpoint: {where}/checkpoints/last.ckpt" in caplog.text
    assert (record.state, record.step, record.max_steps, record.exit_code) == ("finished", 3, 3, 0)


def test_a_name_is_a_runs_own_until_it_goes_on(run, folder, refuse):
    run("--name", "first", *CHECKPOINTS)
    began = read_record(folder / "runs/first").started
    assert refuse("--config", "base.yaml", "--name", "first").startswith("`--name first`: there is a run of this name")
    run("--name", "second", *CHECKPOINTS)

    cli = run("--name", "first", *CHECKPOINTS, "--ckpt_path", "last", "--trainer.max_steps", "4")
    evaluated = run("validate", "--name", "first", *CHECKPOINTS, "--ckpt_path", "last").trainer

    assert cli.trainer.global_step == 4
    assert [path.name for path in run_folders(folder)] == ["first", "second"]
    record = read_record(folder / "runs/first")
    assert (record.started, record.step, record.state) == (began, 4, "finished")
    assert evaluated.ckpt_path == "runs/first/checkpoints/last.ckpt"
    assert evaluated.logger.version.startswith("first-validate-")


def test_without_a_logger_the_name_is_the_folder_of_all(run, folder):
    run("--trainer.logger", "false", "--name", "first", *CHECKPOINTS)
    assert {path.name for path in (folder / "runs/first").iterdir()} == {"config.yaml", "checkpoints"}


@pytest.mark.parametrize("name", ["7", "a/b", "", "-x"])
def test_a_name_that_is_no_folders_is_refused(refuse, name):
    assert refuse("--config", "base.yaml", f"--name={name}").startswith(f"`--name {name}`: expected a letter, then")


def test_a_name_and_a_version_are_one_too_many(refuse):
    said = refuse(
        "--config", "base.yaml", "--name=a", "--trainer.logger=ResumableCSVLogger", "--trainer.logger.version=3"
    )
    assert said == "`--name a` and the logger's `version: 3` both name the run. Leave one of them out."


def test_runs_of_older_versions_are_found(run, folder, capsys):
    version = ["--trainer.logger=ResumableCSVLogger", "--trainer.logger.save_dir=runs"]
    for number in (0, 10):
        run(*CHECKPOINTS, *version, f"--trainer.logger.version={number}")
        (folder / f"runs/version_{number}/run.json").unlink()
    (folder / "runs/version_0/final_validation.json").write_text('{"step": 3, "ended_by": "x", "exit_code": 3}')

    assert [line[:3] for line in listed(capsys)[1:]] == [["version_0", "stopped", "3"], ["version_10", "unknown", "3"]]
    cli = run(*CHECKPOINTS, "--ckpt_path", "last", "--trainer.max_steps", "4")
    assert cli.trainer.logger.log_dir == "runs/version_10"
    assert run("--name", "version_0", *CHECKPOINTS, "--ckpt_path", "last").trainer.logger.version == 0


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_the_list_tells_states_apart(run, folder, capsys):
    """Two records that say `running`: of a run at work, and of one that is gone."""
    run("--name", "good")
    with pytest.raises(ValueError, match="enough"):
        run("--name", "bad", "--trainer.callbacks+=tests.cli.test_run_folders.Fail")
    running = replace(read_record(folder / "runs/good"), state="running", ended_by="", step=1, started="2999")
    for name in ("gone", "there"):
        write_record(folder / "runs" / name, replace(running, name=name, host="elsewhere"))
    (folder / "runs/gone/metrics.csv").write_text("a,step,val/reward\n1,0,0.5\n2,4,\n3,9")  # the last row is torn

    with held(folder / "runs/there"):
        lines = listed(capsys)

    assert lines[0] == ["run", "state", "step", "reward", "began (UTC)", "ended by"]
    good, bad, gone, there = (line for line in lines[1:])
    assert good[:3] == ["good", "finished", "3/3"]
    assert good[3].endswith("(loss)")
    assert (bad[:3], bad[-1]) == (["bad", "failed", "1/3"], "ValueError: enough")
    assert gone[:4] == ["gone", "killed", "5/3", "0.5 (val/reward)"]
    assert there[:3] == ["there", "running", "1/3"]
    (first, *_) = (json.loads(" ".join(line)) for line in listed(capsys, "runs/good", "--json"))
    assert (first["state"], first["exit_code"]) == ("finished", 0)


def test_the_list_is_there_before_torch(run, folder):
    run("--name", "first")
    code = (
        "import sys; from verl_lightning.cli import main\ntry: main(['runs'])\nfinally: print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert "first  finished" in shown
    assert shown.endswith("False\n")


def test_the_report_shows_curves_settings_and_versions(run, folder):
    run("--name", "first", "--trainer.val_check_interval=1")
    page = (folder / "runs/first/report.html").read_text()

    assert '<h1>first <span class="state finished">finished</span></h1>' in page
    curve = re.search(r'<figcaption><span>loss</span>.*?<polyline points="([^"]*)"', page, re.DOTALL)
    assert len(curve[1].split()) == 3
    assert "class_path: tests.cli.toy.ToyModule" in page
    assert "<th>lightning</th><td>2.6" in page
    assert not re.search(r"<script|<link|\bsrc=|https?://|url\(", page.partition("<pre>")[0])


def test_an_unwritten_folder_is_told(capsys):
    with pytest.raises(ValueError, match="`nowhere` is no folder"):
        list_runs(["nowhere"])


def test_names_are_made_of_files():
    assert stem_of(Path("a/grpo.yaml")) == "grpo"
    assert stem_of(Path("runs/grpo-7b-20261129-205503-2/config.yaml")) == "grpo-7b"
    assert re.fullmatch(r"run-7b-x-\d{8}-\d{6}", timed_name("7b x"))
    assert re.fullmatch(r"run-\d{8}-\d{6}", timed_name("数"))


def test_a_record_of_a_newer_version_can_be_read(tmp_path):
    (tmp_path / "run.json").write_text('{"state": "finished", "colour": "blue"}')
    assert read_record(tmp_path) == RunRecord(name=tmp_path.name, state="finished")


def test_settings_without_a_file_are_named_after_their_module(folder):
    CLI({"model": {"class_path": "ToyModule"}, "data": {"class_path": "ToyData"}, "trainer": {"max_steps": 1}})
    assert re.fullmatch(r"toy-\d{8}-\d{6}", run_folders(folder)[0].name)
