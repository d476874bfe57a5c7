"""`verl-fit doctor` tells what is there, what is not, and what to do."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from verl_lightning.cli import main
from verl_lightning.cli.doctor import examine_devices, examine_megatron, examine_package


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a distribution's metadata before those that are installed."""

    def write(name: str, version: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return write


def test_doctor_shows_versions_and_needs_only_the_package_itself(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["doctor"])

    lines = capsys.readouterr().out.splitlines()
    assert stop.value.code == 0
    assert f"ok  torch         {torch.__version__}" in lines
    assert f"ok  lightning     {importlib.metadata.version('lightning')}" in lines
    assert {"ddp", "fsdp", "megatron", "vllm", "ray", "wandb", "gpu"} <= {line.split()[1] for line in lines}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_named_part_that_is_missing_fails_the_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "gpu"])

    assert stop.value.code == 1
    assert "gpu           none, training runs on the CPU; for GPUs, install" in capsys.readouterr().out
    assert [finding.works for finding in examine_devices()] == [False]


def test_an_unknown_part_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "tpu"])

    assert stop.value.code == 2
    assert "knows no part `tpu`. Choose from python, torch," in capsys.readouterr().err


def test_a_version_outside_the_allowed_ones_is_told(install):
    install("wandb", "0.1.0")

    finding = examine_package("wandb", fix="`pip install wandb`")

    assert (finding.works, str(finding)) == (False, "--  wandb         0.1.0, needed is >=0.31; `pip install wandb`")


@pytest.mark.parametrize(("bridge", "works"), [("0.5.0", False), ("0.6.2", True)])
def test_megatron_needs_core_and_bridge_of_the_right_versions(install, bridge, works):
    install("megatron-core", "0.19.2")
    install("megatron-bridge", bridge)

    finding = examine_megatron()

    assert finding.works == works
    assert finding.found == f"megatron-core 0.19.2, megatron-bridge {bridge}"
    assert ("`pip install 'megatron-core==0.19.*'" in finding.fix) == (not works)
