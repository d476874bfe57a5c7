"""Manifests for KubeRay: the whole of one, and what is refused."""

from __future__ import annotations

import shlex

import pytest
import yaml

from verl_lightning.cli import main
from verl_lightning.submit.kubernetes import parse, write_manifest

JOB = ["--image", "registry/rl:1", "--claim", "shared", "--cpus-per-node", "32", "--name", "grpo-7b"]
GPUS = ["--nodes", "2", "--gpus-per-node", "8", "--memory", "512Gi"]


def manifest(*words: str) -> list[dict]:
    """The objects that `verl-fit kubernetes` would write."""
    return list(yaml.safe_load_all(write_manifest(*parse(words))))


def test_a_run_has_its_files_a_cluster_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "trainer:\n  max_steps: 3  # few\n"
    (tmp_path / "mine.yaml").write_text(text)

    files, job = manifest(*JOB, *GPUS, "--namespace=rl", "--", "--config", "grpo", "--config=mine.yaml")

    assert files["data"] == {"mine.yaml": text}
    assert job["metadata"] == files["metadata"] == {"name": "grpo-7b", "namespace": "rl"}
    spec, (group,) = job["spec"], job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    words = shlex.split(spec["entrypoint"])
    assert words[:3] == ["cd", "/shared", "&&"]
    own, settings = words[3 : words.index("--")], words[words.index("--") + 1 :]
    assert own == ["verl-fit", "ray", "--num-workers", "16", "--wait", "600", "--address", "auto"]
    assert settings[:3] == ["--config", "grpo", "--config=/etc/verl-fit/mine.yaml"]
    assert settings[3:] == ["--name", "grpo-7b", "--ckpt_path", "auto"]
    assert (spec["backoffLimit"], spec["shutdownAfterJobFinishes"]) == (3, True)
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 2
    pod = group["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 360
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": 32, "memory": "512Gi", "nvidia.com/gpu": 8}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/shared", "/dev/shm", "/etc/verl-fit"}


def test_a_run_without_files_or_gpus_needs_neither():
    (job,) = manifest(*JOB, "--retries=0", "--", "ray", "--num-workers", "4", "--", "--config", "grpo")

    assert "--name" not in job["spec"]["entrypoint"]
    assert "--num-workers 4" in job["spec"]["entrypoint"]
    assert "nvidia.com/gpu" not in yaml.safe_dump(job)


def test_the_manifest_is_a_file_that_is_written_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words, code, said in [
        (["--dry-run"], 0, "kind: RayJob"),
        ([], 0, "Submit it: kubectl apply -f grpo-7b.yaml"),
        ([], 2, "`grpo-7b.yaml` is there already"),
    ]:
        with pytest.raises(SystemExit) as stop:
            main(["kubernetes", *JOB, *GPUS, *words, "--", "--config", "grpo"])
        assert stop.value.code == code
        assert said in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ([], [], "`--gpus-per-node`, or `ray --num-workers N`"),
        ([*GPUS, "--name=A"], [], "`--name A`: expected at most 47 small letters"),
        (["--memory=lots"], [], "`--memory lots`: expected a size such as"),
        (["--mount=here"], [], "`--mount here`: expected a path from the root"),
        (["--nodes=0"], [], "`--nodes` must be at least 1, got 0"),
        (GPUS, ["--ckpt_path=old.ckpt"], "`ckpt_path: old.ckpt` is where each start would begin again"),
        (GPUS, ["--trainer.devices=4"], "`--trainer.devices` does not apply under Ray"),
        (GPUS, ["--model.actor.optim.lrr=1"], r"model\.actor\.optim\.lrr"),
    ],
)
def test_what_can_not_run_is_refused_with_its_key(options, settings, message):
    with pytest.raises(ValueError, match=message):
        manifest(*JOB, *options, "--", "--config", "grpo", *settings)
