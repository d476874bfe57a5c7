"""Code in model repositories is never executed, whoever is asked about it, and nobody is asked."""

from __future__ import annotations

import ast
import builtins
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollout.vllm_parts import make_vllm_engine
from tests.runs import make_model_config
from tests.strategies.tampering import Command
from tests.tiny import ROOT
from verl_lightning.models.build import build_scorer, build_skeleton
from verl_lightning.models.digests import DamagedFileError
from verl_lightning.models.pretrained import ForeignCodeError, read_config, read_generation_config, read_tokenizer
from verl_lightning.models.streaming import stream_scorer
from verl_lightning.models.tokenizer import load_tokenizer
from verl_lightning.rollout.vllm_launch import llm_options

PRODUCT = ("verl_lightning", "strategies", "callbacks", "benchmarks", "examples")
READERS = {"from_pretrained", "from_config", "from_hf_pretrained", "LLM"}
"""What reads a model's folder and could run its code."""

NO_READERS = {
    ("verl_lightning/models/pretrained.py", "GenerationConfig.from_pretrained"),  # plain values
    ("strategies/megatron/mbridge.py", "AutoBridge.from_config"),  # of a config that was read
}

CODE = """
from pathlib import Path
Path({proof!r}).touch()
from transformers import PreTrainedConfig, PreTrainedTokenizerFast, LlamaForCausalLM
class Config(PreTrainedConfig):
    model_type = "foreign"
class Tokenizer(PreTrainedTokenizerFast):
    pass
Model = LlamaForCausalLM
"""


@pytest.fixture
def foreign(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that needs code of its own, and a user who says yes to everything."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "foreign"))
    (folder / "foreign.py").write_text(CODE.format(proof=str(tmp_path / "proof")))
    classes = {"AutoConfig": "Config", "AutoModelForCausalLM": "Model", "AutoModel": "Model"}
    add(folder / "config.json", model_type="foreign", auto_map={k: f"foreign.{v}" for k, v in classes.items()})
    add(
        folder / "tokenizer_config.json",
        tokenizer_class="Tokenizer",
        auto_map={"AutoTokenizer": [None, "foreign.Tokenizer"]},
    )
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    return folder


def add(file: Path, **values: Any) -> None:
    """Set values in a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


READS: dict[str, Callable[[Path], Any]] = {
    "config": lambda folder: read_config(str(folder)),
    "tokenizer": load_tokenizer,
    "model": lambda folder: build_scorer(make_model_config(folder), "policy", trainable=True),
    "critic": lambda folder: build_scorer(make_model_config(folder), "value", trainable=True),
    "skeleton": lambda folder: build_skeleton(make_model_config(folder), "policy", trainable=False),
    "stream": lambda folder: list(stream_scorer(make_model_config(folder), "policy", trainable=True)),
    "vllm": lambda folder: llm_options(make_vllm_engine(folder).config, torch.device("cpu")),
}


@pytest.mark.parametrize("read", READS)
def test_a_models_own_code_is_refused_in_one_sentence(foreign: Path, tmp_path: Path, read: str) -> None:
    with pytest.raises(ForeignCodeError, match=rf"^`path: {foreign}` holds code .* is never executed: use [^\n]*$"):
        READS[read](foreign)
    assert not (tmp_path / "proof").exists()


def test_code_beside_a_known_model_is_left_alone(foreign: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """As many repositories on the hub are: transformers has built the model in since."""
    for name in ("config.json", "tokenizer_config.json"):
        own = json.loads((foreign / name).read_text())
        (foreign / name).write_text(
            json.dumps(json.loads((tiny_folder / name).read_text()) | {"auto_map": own["auto_map"]})
        )

    scorer = build_scorer(make_model_config(foreign), "policy", trainable=True)

    assert type(scorer.backbone).__module__.startswith("transformers.")
    assert read_tokenizer(str(foreign)).chat_template
    assert read_generation_config(str(foreign)) is not None
    assert not (tmp_path / "proof").exists()


def calls(file: Path) -> Iterator[tuple[str, ast.Call]]:
    """What a file calls, by the last two parts of its name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            yield ".".join(ast.unparse(node.func).split(".")[-2:]), node


def test_every_reader_is_told_not_to_trust_code() -> None:
    """What transformers is not told, it asks on a terminal."""
    files = [file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py") if not file.is_symlink()]
    trusting = [
        f"{file.relative_to(ROOT)}:{call.lineno}: {name}"
        for file in files
        for name, call in calls(file)
        if name.rpartition(".")[2] in READERS and (str(file.relative_to(ROOT)), name) not in NO_READERS
        if not any(
            word.arg == "trust_remote_code" and isinstance(word.value, ast.Constant) and word.value.value is False
            for word in call.keywords
        )
    ]
    assert len(files) > 100
    assert not trusting


def test_weights_run_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "pickled"))
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Command(tmp_path / "proof")}, folder / "pytorch_model.bin")
    for read in ("model", "stream"):
        with pytest.raises(DamagedFileError, match=r"^`.*/pytorch_model\.bin` holds more than .* \(`posix\.system`\)"):
            READS[read](folder)
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("read", ["model", "stream"])
@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_half_a_file_of_weights_is_named(tiny_folder: Path, tmp_path: Path, read: str, size: int) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "half"))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(DamagedFileError, match=rf"^`{file}` is damaged, or not the whole of a file of weights"):
        READS[read](folder)


@pytest.mark.parametrize("read", ["config", "model", "skeleton", "stream", "vllm"])
@pytest.mark.parametrize("content", ["{}", "[]", '{"model_type": "unheard_of"}', '{"model_type": 3}'])
def test_a_config_that_says_nothing_is_told_in_a_sentence(
    tiny_folder: Path, tmp_path: Path, read: str, content: str
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "odd"))
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"^`path: {folder}` is no model that transformers knows: [^\n]*$"):
        READS[read](folder)
