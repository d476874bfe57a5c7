"""Hydra's `defaults` lists: which files they name, where their settings come, and which wins."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml

from verl_lightning.migrate.composing import compose, flatten
from verl_lightning.migrate.reading import read_verl
from verl_lightning.migrate.report import migrate

FILES = {
    "base.yaml": """
defaults:
  - model_engine: dp
  - actor@role.actor: ${model_engine}_actor
  - engine@engine: fsdp
  - extras
  - _self_
role: {actor: {lr: 3}, name: base}
""",
    "model_engine/dp.yaml": "# @package _global_\nmodel_engine: dp",
    "model_engine/megatron.yaml": "# @package _global_\nmodel_engine: megatron",
    "actor/actor.yaml": "lr: 1\nclip: 0.2\nshape: {}",
    "actor/dp_actor.yaml": "defaults: [../engine@engine: fsdp, actor, _self_]\nkind: dp\nlr: 2",
    "actor/megatron_actor.yaml": "defaults: [../engine@engine: megatron, actor, _self_]\nkind: megatron",
    "engine/fsdp.yaml": "size: -1",
    "engine/megatron.yaml": "tensor: 2",
    "extras.yaml": "extra: {kept: true}",
    "mine.yaml": "defaults: [base, override model_engine: megatron, other@role.other: gone]\nextra: {kept: false}",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_files_come_under_their_packages_in_the_order_of_the_list(folder):
    assert compose(folder / "base.yaml", {}) == {
        "model_engine": "dp",
        "role.actor.engine.size": -1,
        "role.actor.lr": 3,
        "role.actor.clip": 0.2,
        "role.actor.shape": {},
        "role.actor.kind": "dp",
        "engine.size": -1,
        "extra.kept": True,
        "role.name": "base",
    }


def test_a_file_over_another_chooses_groups_and_wins(folder):
    """A file that is not there is told of."""
    found = compose(folder / "mine.yaml", {})
    assert (found["model_engine"], found["role.actor.kind"], found["role.actor.engine.tensor"]) == ("megatron",) * 2 + (
        2,
    )
    assert found["extra.kept"] is False
    assert found["defaults.other"] == "gone"


def test_the_command_line_chooses_groups(folder):
    given = read_verl(str(folder / "base.yaml"), ["model_engine=megatron", "engine=megatron", "engine.tensor=4"])
    assert (given["role.actor.kind"], given["engine.tensor"]) == ("megatron", 4)
    assert "engine.size" not in given


def test_a_search_path_leads_to_further_files(folder):
    (folder / "own").mkdir()
    (folder / "own" / "run.yaml").write_text(f"hydra: {{searchpath: ['file://{folder}']}}\ndefaults: [extras]\na: 1")
    assert compose(folder / "own" / "run.yaml", {})["extra.kept"] is True


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer"])
def test_verls_own_files_compose_to_what_verl_has_composed(name):
    """Needs verl on the path, unpacked or installed without its dependencies; nothing of it is imported."""
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        pytest.skip("put the unpacked package of verl on PYTHONPATH")
    config = Path(spec.origin).parent / "trainer" / "config"
    expected = flatten(yaml.safe_load((config / f"_generated_{name}.yaml").read_text()))
    found = compose(config / f"{name}.yaml", {})
    assert {key: value for key, value in found.items() if key != "model_engine"} == expected
    lines = migrate(read_verl(str(config / f"{name}.yaml"), [])).lines
    assert [line.key for line in lines if line.words == "this key is not known"] == []
