"""What Megatron saved, loaded by others, and the other way round: its row and column of ``docs/checkpoints.md``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForCausalLM

from tests.callbacks.saved_runs import LORA, STEPS, logits_with, run_sft
from tests.processes import on_ranks
from tests.runs import make_prompts, make_rollout, make_trainer
from tests.strategies.conformance import Bench
from tests.strategies.megatron.checks import Ending
from tests.strategies.megatron.ranks import Runs
from tests.strategies.megatron.sft_checks import scored_batch
from tests.tolerances import assert_near
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.cli.export import main as export
from verl_lightning.models.digests import DIGESTS_FILE
from verl_lightning.models.hf_folder import PARTIAL_SUFFIX
from verl_lightning.modules.ppo_config import CriticConfig
from verl_lightning.strategies.fsdp.checkpoint import FORMAT, read_whole
from verl_lightning.strategies.megatron.portable import read_portable

pytestmark = [
    pytest.mark.backend,
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),  # without the callback that saves
]

TOKENS = scored_batch().input_ids
LOADERS = [("auto", 1), ("ddp", 2), ("fsdp", 2)]


@pytest.fixture(params=LORA)
def kind(request: pytest.FixtureRequest) -> str:
    """What was trained."""
    return str(request.param)


@pytest.fixture
def saved_runs(tensor_parallel: Runs) -> dict[str, Any]:
    """What became of the runs that left behind what others load."""
    runs: dict[str, Any] = tensor_parallel["saved_runs"]
    return runs


@pytest.fixture
def resharded(pipeline_parallel: Runs) -> dict[str, Tensor]:
    """The last weights of the run that left ``resharded`` behind."""
    weights: dict[str, Tensor] = pipeline_parallel["reshard"]["weights"]
    return weights


def base_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def log_probs_of(model: Any) -> Tensor:
    """Of each token but the first of a row."""
    with torch.no_grad():
        predicted = model.eval()(TOKENS).logits[:, :-1].log_softmax(-1)
    return predicted.gather(-1, TOKENS[:, 1:, None])[..., 0]


@pytest.mark.parametrize(("loader", "ranks"), LOADERS)
def test_another_strategy_goes_on_from_megatrons_checkpoint(folder, saved_runs, tmp_path, kind, loader, ranks):
    """The last step is that of the run that was not stopped: AdamW's moments and the schedule go on too."""
    checkpoint = str(folder / f"megatron-{kind}" / f"step={STEPS - 1}.ckpt")
    words = (folder / "model", folder / "chats.jsonl", tmp_path, kind, loader, ranks, checkpoint)

    resumed = on_ranks(ranks, run_sft, *words)[0]

    assert_near(resumed, saved_runs[kind]["end"], rel=1e-3)


@pytest.mark.parametrize("saver", ["auto", "fsdp"])
def test_megatron_takes_the_weights_of_others(folder, tensor_parallel, tmp_path, kind, saver):
    """Of their checkpoint, where a run of `auto` that starts from it begins; and of their folders."""
    loaded = tensor_parallel["loaded_runs"]

    stored = torch_state(folder / f"{saver}-{kind}" / f"step={STEPS - 1}.ckpt")
    same = assert_equal if kind == "full" else assert_near  # adapters are added
    same(loaded[saver, kind, "checkpoint"], merged_state(folder, stored, kind))
    same(loaded[saver, kind, "folder"], load_file(folder / f"{saver}-{kind}" / "weights.safetensors"))


def assert_equal(actual: Any, expected: Any) -> None:
    """To the last bit."""
    assert_close(actual, expected, rtol=0, atol=0)


def torch_state(path: Path) -> dict[str, Tensor]:
    """The weights in a checkpoint of `auto` or `fsdp`."""
    checkpoint = read_whole(path, weights_only=True) if FORMAT.is_at(path) else torch.load(path)
    return {name.removeprefix("actor.backbone."): w for name, w in checkpoint["state_dict"].items()}


def merged_state(folder: Path, state: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Whole weights by their names; adapters are added to the base's by hand."""
    weights = {name: p.detach() for name, p in base_of(folder / "model").named_parameters()}
    if kind == "full":
        return {name: state[name] for name in weights}
    lora = LORA["lora"]
    assert lora is not None
    for name, down in state.items():
        if ".lora_A." in name:
            up = state[name.replace("lora_A", "lora_B")]
            weights[f"{name.partition('.lora_A')[0]}.weight"] += up @ down * (lora.alpha / lora.rank)
    return weights


MEASURED = {
    "sft": ("train/loss", "train/grad_norm", "train/lr"),
    "grpo": ("critic/score/mean", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/lr"),
}


@pytest.mark.parametrize("task", MEASURED)
def test_a_command_goes_on_when_its_strategy_alone_changes(fsdp_commands, pipeline_parallel, task):
    """`verl-fit ... --strategy fsdp`, then `--strategy megatron --ckpt_path`: its next step is that of `fsdp`.

    The one after it is near: AdamW has started anew, and says so.
    """
    third, fourth = fsdp_commands[task]["steps"][2:]
    run = pipeline_parallel["switched"][task]["resumed"]
    first, second = run["steps"]

    assert [first[n] for n in MEASURED[task]] == pytest.approx([third[n] for n in MEASURED[task]], rel=1e-4, abs=1e-6)
    assert second[MEASURED[task][0]] == pytest.approx(fourth[MEASURED[task][0]], rel=0.05)
    assert second[MEASURED[task][-1]] == fourth[MEASURED[task][-1]]
    assert any("AdamW starts anew" in message for message in run["told"])


@pytest.mark.parametrize("task", MEASURED)
def test_a_command_starts_from_the_folder_that_another_strategy_left(fsdp_commands, pipeline_parallel, task):
    start = pipeline_parallel["switched"][task]["started"]["start"]
    assert_equal(start, fsdp_commands[task]["end"])


def test_adapters_go_on_with_other_tensor_parallel_ranks(saved_runs, pipeline_parallel):
    """From two ranks that share layers to two stages."""
    assert_near(pipeline_parallel["adapters_resharded"], saved_runs["lora"]["end"], rel=1e-3)


def test_peft_says_what_the_trainer_says(folder, saved_runs):
    adapted = PeftModel.from_pretrained(base_of(folder / "model"), folder / "megatron-lora" / "hf" / "last")

    run = saved_runs["lora"]
    assert_near(log_probs_of(adapted), run["log_probs"], rel=1e-5)
    with torch.no_grad():
        expected = logits_with(base_of(folder / "model"), run["end"], TOKENS)
        assert_near(adapted.eval()(TOKENS).logits, expected, rel=1e-5)
    assert not torch.allclose(log_probs_of(base_of(folder / "model")), run["log_probs"], atol=1e-3)


@pytest.mark.parametrize("name", ["megatron-lora/merged", "megatron-lora/hf", "megatron-full/hf"])
def test_transformers_says_what_the_trainer_says(folder, saved_runs, name):
    run = saved_runs["full" if "full" in name else "lora"]
    assert_near(log_probs_of(base_of(folder / name / "last")), run["log_probs"], rel=1e-5)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_folders_have_the_form_of_those_of_auto(folder, saved_runs, kind):
    """vLLM loads those of `auto` in `tests/rollout/test_vllm_folders.py`: what it reads is the same but for values."""
    for name in ["hf"] if kind == "full" else ["hf", "merged"]:
        ours, theirs = (folder / f"{saver}-{kind}" / name / "last" for saver in ("megatron", "auto"))
        assert form_of(ours) == form_of(theirs)


def form_of(folder: Path) -> dict[str, Any]:
    """Each file by name: text as it is, of tensors names, types and shapes."""
    form: dict[str, Any] = {}
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
                form[path.name] = {key: (part.get_dtype(), part.get_shape()) for key, part in slices.items()}
                form["metadata"] = file.metadata()
        elif path.name == DIGESTS_FILE:
            form[path.name] = {name: digest["size"] for name, digest in json.loads(path.read_text()).items()}
        elif path.suffix == ".json":
            form[path.name] = json.loads(path.read_text())
        else:
            form[path.name] = path.read_bytes()
    return form


@pytest.mark.parametrize(("to", "name"), [("hf", "full/hf"), ("peft", "lora/hf"), ("merged", "lora/merged")])
def test_a_checkpoint_is_exported_as_its_run_wrote_it(folder, saved_runs, tmp_path, to, name):
    """By `verl-export`, which imports no Megatron."""
    kind = name.partition("/")[0]
    actor = {"path": str(folder / "model"), "lora": kind == "lora" and vars(LORA["lora"]) or None}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"model": {"init_args": {"actor": actor}}}))
    checkpoint = folder / f"megatron-{kind}" / f"step={STEPS}.ckpt"

    words = ["--ckpt_path", checkpoint, "--config", config, "--to", to, "--output", tmp_path / "out"]
    export([str(word) for word in words])

    written, expected = tmp_path / "out", folder / f"megatron-{name}" / "last"
    assert form_of(written) == form_of(expected)
    for file in expected.glob("*.safetensors"):
        same = assert_near if to == "merged" else assert_equal
        same(load_file(written / file.name), load_file(file))


def test_a_critic_is_exported_with_its_head(folder, tensor_parallel, tmp_path):
    trained = tensor_parallel["resume"]["whole"]["weights"]
    model = {"path": str(folder / "model")}
    config = tmp_path / "config.yaml"
    settings = {"model": {"init_args": {"actor": model, "critic": {"model": model}}}}
    config.write_text(yaml.safe_dump(settings))

    words = ["--ckpt_path", folder / "whole" / "step=4.ckpt", "--config", config, "--to", "hf", "--role", "critic"]
    export([*map(str, words), "--output", str(tmp_path / "out")])

    head = load_file(tmp_path / "out" / "value_head.safetensors")["weight"]
    assert_equal(head, trained["critic.value_head"])
    for name, weight in AutoModel.from_pretrained(tmp_path / "out").named_parameters():
        assert_equal(weight.detach(), trained[f"critic.{name}"])


def test_a_pipelines_checkpoint_is_taken_apart(folder, resharded):
    """Two models whose layers lie on two stages, one of them with a tied embedding."""
    state = read_portable(folder / "resharded" / "step=4.ckpt", weights_only=True)["state_dict"]

    trained = dict(resharded)
    head = trained.pop("critic.value_head")
    assert_equal(state["critic.value_head.weight"], head)
    for name, weight in trained.items():
        role, _, rest = name.partition(".")
        assert_equal(state[f"{role}.backbone.{rest}"], weight)


def test_one_process_goes_on_from_a_pipelines_checkpoint(folder, resharded, tmp_path):
    """With AdamW's moments, of the tied model too: the last step is that of the two stages."""
    bench, ending = Bench(strategy="auto", devices=1, folder=folder), Ending()
    module = bench.ppo(advantage=GAE(), critic=CriticConfig(model=bench.model()))
    trainer = make_trainer(tmp_path, make_rollout(), ending, max_steps=4)

    data = make_prompts(folder / "prompts.jsonl")
    trainer.fit(module, datamodule=data, ckpt_path=folder / "resharded" / "step=3.ckpt", weights_only=True)

    expected = {n: w for n, w in resharded.items() if n != "critic.value_head"}
    ours = {n: w for n, w in ending.weights.items() if n != "critic.value_head"}
    assert_near(ours, expected)


def test_a_shifted_state_is_refused_elsewhere(folder, pipeline_parallel):
    """As Megatron-Core 0.19 itself saves it. The weights are right, and are taken without it."""
    assert pipeline_parallel["resume_shifted"]  # which has saved it
    path = folder / "shifted.ckpt"
    assert read_portable(path, weights_only=True, with_optimizers=False)["state_dict"]
    with pytest.raises(ValueError, match="in an order of its own.*with `verl-export`"):
        read_portable(path, weights_only=True)


def test_a_killed_save_leaves_the_previous_checkpoint(conversions):
    """One of another model was to take its place; half of that lies in a hidden folder that no loader takes."""
    path = Path(conversions["killed"])
    partial = path.with_name(f".{path.name}{PARTIAL_SUFFIX}")

    state = read_portable(path, weights_only=True)["state_dict"]

    assert_equal(state, conversions["llama apart"]["expected"])
    assert partial.is_dir()
    with pytest.raises(FileNotFoundError, match="megatron_meta.pt"):
        read_portable(partial, weights_only=True)


def test_a_checkpoint_holds_adapters_alone(folder, saved_runs):
    """A weight, AdamW's own copy of it and its two moments."""
    stored = FileSystemReader(folder / "megatron-lora" / f"step={STEPS}.ckpt").read_metadata().state_dict_metadata
    numel = sum(math.prod(part.size) for part in stored.values() if hasattr(part, "size"))
    adapters = load_file(folder / "megatron-lora" / "hf" / "last" / "adapter_model.safetensors")
    assert numel == 4 * sum(weight.numel() for weight in adapters.values())


def test_adapters_that_do_not_fit_are_refused(tensor_parallel):
    told = tensor_parallel["refusals"]
    assert "was trained on another base than `path:" in told["another base"]
    assert "has rank 4, but `lora.rank` is 8. Set `lora.rank: 4`" in told["another rank"]
    assert "`lora.target_modules` names `q_proj` but not `k_proj`" in told["one of q, k and v"]
    assert "`lora.modules_to_save: ['norm']` can't be trained under `megatron`" in told["a whole module"]
