"""Job scripts for SLURM: their text, what is refused, and what a shell does with them."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from verl_lightning.cli import main
from verl_lightning.submit.slurm import parse, seconds_of, write_script

JOB = ["--nodes", "2", "--gpus-per-node", "8", "--time", "24:00:00", "--name", "grpo-7b"]
UNDER_RAY = [*JOB, "--cpus-per-task", "64", "--", "ray", "--num-workers", "16", "--"]

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=grpo-7b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --chdir=/shared/work
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=USR1@360
#SBATCH --requeue
#SBATCH --partition=h100
#SBATCH --account=rl
#SBATCH --qos=long

export PATH=/shared/env/bin:$PATH
module load cuda

srun --kill-on-bad-exit=0 --cpus-per-task=12 verl-fit --config grpo --model.actor.path 'my model' \
--trainer.devices 8 --trainer.num_nodes 2 --name grpo-7b --ckpt_path auto
code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "verl-fit slurm: not requeued; sbatch the script again." >&2
fi
exit "$code"
"""
RAY_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=grpo-7b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --chdir=/shared/work
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@360
#SBATCH --requeue

export PATH=/shared/env/bin:$PATH

export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head="${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))"
srun --overlap --nodes=1 --ntasks=1 --cpus-per-task=64 --nodelist="${nodes[0]}" \
ray start --head --port="${head#*:}" --num-cpus=64 --num-gpus=8 --block &
for _ in {1..60}; do ray status --address "$head" > /dev/null 2>&1 && break; sleep 5; done
for node in "${nodes[@]:1}"; do
    srun --overlap --nodes=1 --ntasks=1 --cpus-per-task=64 --nodelist="$node" \
ray start --address="$head" --num-cpus=64 --num-gpus=8 --block &
done

trap '[ -z "$driver" ] || kill -USR1 "$driver"' USR1
verl-fit ray --num-workers 16 --wait 300 --address "$head" -- --config grpo --name grpo-7b --ckpt_path auto &
driver=$!
wait "$driver"; code=$?
while [ "$code" -eq 138 ]; do wait "$driver"; code=$?; done  # USR1 ends a wait, not the driver
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "verl-fit slurm: not requeued; sbatch the script again." >&2
fi
exit "$code"
"""


def script(*words: str, folder: Path = Path("/shared/work"), programs: Path = Path("/shared/env/bin")) -> str:
    """What `verl-fit slurm` would write."""
    return write_script(*parse(words), folder, programs)


def command_of(text: str) -> list[str]:
    """The words of `verl-fit` in a script."""
    (line,) = (line for line in text.splitlines() if line.startswith("srun"))
    words = shlex.split(line)
    return words[words.index("verl-fit") + 1 :]


def test_the_script_starts_one_process_on_each_gpu():
    more = [
        "--cpus-per-task",
        "12",
        "--partition=h100",
        "--account=rl",
        "--sbatch=--qos=long",
        "--setup=module load cuda",
    ]

    assert script(*JOB, *more, "--", "--config", "grpo", "--model.actor.path", "my model") == SCRIPT


def test_under_ray_the_script_starts_a_cluster_and_hands_on_the_warning():
    assert script(*UNDER_RAY, "--config", "grpo") == RAY_SCRIPT


def test_devices_and_nodes_come_from_the_settings_where_no_option_says_them():
    text = script("--time=60", "--name=a", "--", "--config", "grpo", "--config", "hardware/megatron_2_nodes")

    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=8", "#SBATCH --gpus-per-node=8"} <= set(text.splitlines())
    assert "--trainer.devices" not in command_of(text)


def test_processes_without_gpus_ask_for_none():
    text = script(
        "--time=60", "--ntasks-per-node=4", "--name=a", "--", "--config", "sft", "--trainer.accelerator", "cpu"
    )

    assert "--ntasks-per-node=4" in text
    assert "gpus" not in text


def test_the_warning_comes_before_the_grace_of_the_run():
    assert "--signal=USR1@960" in script(*JOB, "--", "--config", "grpo", "--preemption.grace", "900")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fit", "--config", "grpo"], ["--name", "grpo-7b", "--ckpt_path", "auto"]),
        (["--config", "grpo", "--ckpt_path", "auto"], ["--name", "grpo-7b"]),
        (["--config", "grpo", "--trainer.logger.version=mine"], ["--ckpt_path", "auto"]),
        (["--config=grpo", "--trainer.logger=false"], ["--name", "grpo-7b", "--ckpt_path", "auto"]),
        (["--config=grpo", "--trainer.logger=[{class_path: CSVLogger}]"], ["--name", "grpo-7b", "--ckpt_path", "auto"]),
        (["validate", "--config", "grpo"], []),
    ],
)
def test_a_job_goes_on_in_a_folder_of_its_own(words, expected):
    devices = ["--trainer.devices", "8", "--trainer.num_nodes", "2"]

    assert command_of(script(*JOB, "--", *words)) == [*words, *devices, *expected]


def test_a_job_that_ends_for_good_runs_the_words_as_they_are():
    text = script(*JOB, "--no-requeue", "--", "--config", "grpo", "--ckpt_path", "old.ckpt")

    assert "#SBATCH --no-requeue\n" in text
    assert "scontrol" not in text
    assert command_of(text)[2:4] == ["--ckpt_path", "old.ckpt"]


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        (["--time=1-x"], [], "`--time 1-x`: expected a time limit"),
        (["--time=6"], [], r"`--time 6` leaves no time.* 360 s before it \(`preemption.grace` 300 s and 60 s\)"),
        (["--nodes=0"], [], "`--nodes` must be at least 1, got 0"),
        (["--ntasks-per-node=2"], [], "leave it or `--gpus-per-node` out"),
        (["--sbatch=--nodes=3"], [], "the script sets `nodes` by itself"),
        (["--sbatch=qos"], [], "expected a whole option"),
        (["--name=7"], [], "`--name 7`: expected a letter"),
        (["--name=bash"], [], "`--name bash`"),
        ([], ["--trainer.devices=4"], "`--gpus-per-node 8` and `trainer.devices: 4` of the settings differ"),
        ([], ["--trainer.num_nodes=4"], "`--nodes 2` and `trainer.num_nodes: 4` of the settings differ"),
        ([], ["--trainer.accelerator=cpu"], "`--gpus-per-node` does not fit `trainer.accelerator: cpu`"),
        ([], ["--preemption.grace=90000"], "leaves no time to train"),
        ([], ["--ckpt_path=old.ckpt"], "`ckpt_path: old.ckpt` is where each start would begin again"),
        ([], ["--trainer.enable_checkpointing=false"], "`trainer.enable_checkpointing: false` saves nothing"),
        ([], ["--trainer.callbacks=[{class_path: HFCheckpoint}]"], "`trainer.callbacks` .* no `ModelCheckpoint`"),
        ([], ["--model.actor.optim.lrr=1"], "model.actor.optim.lrr"),
        ([], ["--nodes=2"], "`--nodes` is an option of `verl-fit slurm`: put it before"),
    ],
)
def test_what_can_not_run_is_refused_with_its_key(options, settings, message):
    with pytest.raises(ValueError, match=message):
        script(*JOB, *options, "--", "--config", "grpo", *settings)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--time=60", "--", "--config", "grpo"], "needs `--gpus-per-node`, or `trainer.devices` in the settings"),
        ([*JOB, "--", "ray", "--num-workers=16", "--config", "grpo"], "needs `--cpus-per-task`"),
        ([*JOB, "--cpus-per-task=64", "--", "ray", "--num-workers=17", "--config", "grpo"], "`--num-workers 17` needs"),
    ],
)
def test_a_job_without_room_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        script(*words)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("2:30", 150), ("1:02:03", 3723), ("2-12", 216000), ("1-0:30", 88200), ("1-00:00:05", 86405)],
)
def test_time_limits_are_read_as_sbatch_reads_them(time, seconds):
    assert seconds_of(time) == seconds


def test_a_script_is_written_once_and_told_how_to_submit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for expected in (0, 2):
        with pytest.raises(SystemExit) as stop:
            main(["slurm", *JOB, "--", "--config", "grpo"])
        assert stop.value.code == expected

    said = capsys.readouterr()
    assert said.out == "Wrote `grpo-7b.sbatch`. Submit it: sbatch grpo-7b.sbatch\n"
    assert "`grpo-7b.sbatch` is there already. Remove it, or choose another `--name`." in said.err
    subprocess.run(["bash", "-n", "grpo-7b.sbatch"], check=True)


@pytest.fixture
def cluster(tmp_path):
    """Runs a script by bash, with small programs in the place of SLURM's, Ray's and `verl-fit`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    note = 'echo "${0##*/} $*" >> calls; '
    bodies = {
        "srun": 'while [[ $1 == -* ]]; do shift; done; "$@"; ',
        "scontrol": '[[ $1 == show ]] && printf "n1\\nn2\\n"; exit "${FAILS:-0}"',
        "ray": "",
        "verl-fit": 'trap "kill %1; exit 75" USR1; sleep "${WAITS-0}" &> /dev/null & touch started; wait; exit "$CODE"',
    }
    for name, body in bodies.items():
        (programs / name).write_text(f"#!/bin/bash\n{note}{body}\n")
        (programs / name).chmod(0o755)

    def run(text: str, **environment: str) -> subprocess.Popen[str]:
        (tmp_path / "job").write_text(text)
        known = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-2]", "PATH": os.environ["PATH"]}
        return subprocess.Popen(
            ["bash", "job"], cwd=tmp_path, env=known | environment, text=True, stderr=subprocess.PIPE
        )

    run.script = lambda *words: script(*words, folder=tmp_path, programs=programs)
    return run


@pytest.mark.parametrize(("code", "is_requeued"), [(75, True), (0, False), (1, False), (3, False), (143, False)])
def test_only_a_preempted_run_is_put_into_the_queue_again(cluster, tmp_path, code, is_requeued):
    process = cluster(cluster.script(*JOB, "--", "--config", "grpo"), CODE=str(code))

    process.communicate()
    assert process.returncode == code
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [line.partition(" ")[0] for line in calls[:2]] == ["srun", "verl-fit"]
    assert calls[2:] == ["scontrol requeue 4711"] * is_requeued


def test_a_job_that_can_not_be_requeued_says_what_to_do(cluster):
    process = cluster(cluster.script(*JOB, "--", "--config", "grpo"), CODE="75", FAILS="1")

    assert "not requeued; sbatch the script again" in process.communicate()[1]
    assert process.returncode == 75


def test_under_ray_the_warning_reaches_the_driver_and_the_job_is_requeued(cluster, tmp_path):
    process = cluster(cluster.script(*UNDER_RAY, "--config", "grpo"), CODE="0", WAITS="60")
    while not (tmp_path / "started").exists() or (tmp_path / "calls").read_text().count("\nray start") < 2:
        time.sleep(0.01)  # the nodes start in the background
    while process.poll() is None:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.01)

    process.communicate()
    assert process.returncode == 75
    calls = (tmp_path / "calls").read_text()
    assert "ray start --head --port=24711" in calls
    assert calls.count("ray start --address=n1:24711") == 2  # noted by srun, too
    assert "verl-fit ray --num-workers 16 --wait 300 --address n1:24711 -- --config grpo" in calls
    assert calls.endswith("scontrol requeue 4711\n")
