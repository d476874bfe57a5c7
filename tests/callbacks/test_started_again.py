"""Folders that `HFCheckpoint` and `verl-export` write, from which the next run starts with equal scores and values."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save
from torch.testing import assert_close
from transformers import LlamaForCausalLM

from tests.runs import make_chats, make_model_config, make_ppo, make_prompts, make_rollout, make_sft, make_trainer
from tests.tiny import tiny_model, tiny_tokenizer, write_tiny_folder
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.callbacks import HFCheckpoint
from verl_lightning.cli.export import export
from verl_lightning.models.build import build_scorer
from verl_lightning.models.config import LoraConfig, ModelConfig
from verl_lightning.models.scorer import TokenScorer
from verl_lightning.models.streaming import build_hollow, stream_scorer
from verl_lightning.modules import PPOModule
from verl_lightning.modules.ppo_config import CriticConfig
from verl_lightning.types import Scores, TokenBatch

LORA = LoraConfig(rank=4, alpha=8.0)
WHOLE_HEAD = replace(LORA, modules_to_save=["lm_head"])


@dataclass(frozen=True, kw_only=True)
class Run:
    """A short run and what it left behind."""

    folder: Path
    module: PPOModule

    def wrote(self, role: str, how: str) -> Path:
        """The folder of one role, which `HFCheckpoint` or `verl-export` wrote."""
        if how.startswith("checkpoint"):
            return self.folder / f"{role}-{how.removeprefix('checkpoint-')}" / "last"
        output = self.folder / f"{role}-{how}"
        checkpoint = self.folder / "trainer" / "last.ckpt"
        export(checkpoint, output, to=how.removeprefix("export-"), role=role, config=self.folder / "config.yaml")  # type: ignore[arg-type]
        return output


def write_untied_folder(path: Path) -> Path:
    """The tiny model with an output head of its own."""
    tiny_tokenizer().save_pretrained(path)
    config = tiny_model().config
    config.tie_word_embeddings = False
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def train(folder: Path, base: Path, prompts: Path, lora: LoraConfig | None, *, shares: bool) -> Run:
    """Two iterations of PPO, with a critic of its own or on the actor's trunk."""
    actor = make_model_config(base, lr=1e-2, lora=lora)
    critic = None if shares else make_model_config(folder / "trunk", lr=2e-2, lora=lora and LORA)
    shutil.copytree(base, folder / "trunk", ignore=lambda *_: {"tokenizer.json", "chat_template.jinja"})
    module = make_ppo(base, actor=actor, advantage=GAE(), critic=CriticConfig(model=critic))
    forms = {"plain": {}} | ({"merged": {"merge_adapters": True}} if lora else {})
    callbacks = [ModelCheckpoint(folder / "trainer", "last", every_n_train_steps=2)]
    for role in ("actor",) if shares else ("actor", "critic"):
        callbacks += [HFCheckpoint(str(folder / f"{role}-{name}"), role=role, **form) for name, form in forms.items()]
    trainer = make_trainer(folder, make_rollout(), *callbacks, max_steps=2, enable_checkpointing=True)
    trainer.fit(module, datamodule=make_prompts(prompts))
    lora_settings = lora and {"rank": lora.rank, "alpha": lora.alpha, "modules_to_save": lora.modules_to_save}
    settings: dict[str, Any] = {"path": str(base), "lora": lora_settings}
    own = {"path": str(folder / "trunk"), "lora": lora and {"rank": 4, "alpha": 8.0}}
    critic_settings = {"model": None if shares else own}
    text = yaml.safe_dump({"model": {"init_args": {"actor": settings, "critic": critic_settings}}})
    (folder / "config.yaml").write_text(text)
    return Run(folder=folder, module=module)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, prompt_file):
    """By what is trained: all weights or adapters, a critic or a shared trunk; embeddings are tied or not."""
    tied = write_tiny_folder(tmp_path_factory.mktemp("tied") / "model", seed=1)
    untied = write_untied_folder(tmp_path_factory.mktemp("untied") / "model")
    kinds = {
        "full": (tied, None, False),
        "full-shared": (untied, None, True),
        "lora": (untied, WHOLE_HEAD, False),
        "lora-shared": (tied, LORA, True),
    }
    return {
        name: train(tmp_path_factory.mktemp(name), base, prompt_file, lora, shares=shares)
        for name, (base, lora, shares) in kinds.items()
    }


def batch() -> TokenBatch:
    """Two left-padded prompts of three tokens and responses of four."""
    ids = torch.arange(14).view(2, 7) % 31 + 6
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, :2] = False
    return TokenBatch(input_ids=ids, attention_mask=mask, response_mask=mask[:, 3:])


@torch.no_grad()
def score(model: TokenScorer) -> Scores:
    return model.eval()(batch())


def streamed(config: ModelConfig, head: Any) -> TokenScorer:
    """What ranks that shard a model are sent."""
    model = build_hollow(config, head, trainable=True)
    parts = {name: value for part in stream_scorer(config, head, trainable=True) for name, value in part.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in parts:
            parameter.data = parts[name].clone()
    model.backbone.tie_weights()
    return model


def check(run: Run, role: str, how: str, base: ModelConfig) -> None:
    """That a run which starts from a folder begins where the other run ended."""
    trained = run.module.policy if role == "actor" else run.module.critic
    assert trained is not None
    folder = run.wrote(role, how)
    is_adapter = (folder / "adapter_config.json").exists()
    config = (
        replace(base, lora=replace(base.lora, adapter_path=str(folder)))
        if is_adapter
        else ModelConfig(path=str(folder))
    )
    expected = score(trained)
    # A merged weight is a rounded sum, and a layer's product with it too.
    tolerance = {"rtol": 0, "atol": 0 if is_adapter or base.lora is None else 1e-5}
    for build in (lambda: build_scorer(config, trained.head, trainable=True), lambda: streamed(config, trained.head)):
        found = score(build())
        for name in ("log_probs", "values"):
            ours, theirs = getattr(found, name), getattr(expected, name)
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                assert theirs.std() > 1e-3
                assert_close(ours, theirs, **tolerance)


FORMS = {
    "full": ("checkpoint-plain", "export-hf"),
    "lora": ("checkpoint-plain", "checkpoint-merged", "export-peft", "export-merged"),
}


@pytest.mark.parametrize("kind", ["full", "full-shared", "lora", "lora-shared"])
def test_a_run_starts_where_the_other_ended(runs, kind):
    run = runs[kind]
    critic = run.module.critic_config.model
    for how in FORMS[kind.partition("-")[0]]:
        check(run, "actor", how, run.module.policy_config)
        if critic is not None:
            check(run, "critic", how, critic)


def test_a_critic_starts_from_a_shared_trunk(runs):
    """Of whose folder it takes the trunk and the value head."""
    for kind, how in (("full-shared", "checkpoint-plain"), ("lora-shared", "checkpoint-merged")):
        run = runs[kind]
        critic = build_scorer(ModelConfig(path=str(run.wrote("actor", how))), "value", trainable=True)
        assert_close(score(critic).values, score(run.module.policy).values, rtol=0, atol=1e-5)


def test_a_folder_that_lacks_weights_is_refused(runs):
    """A critic has no output head, which would be drawn at random."""
    run = runs["full"]
    untied = runs["lora"].wrote("critic", "checkpoint-merged")
    build_scorer(ModelConfig(path=str(run.wrote("critic", "checkpoint-plain"))), "policy", trainable=True)  # tied

    with pytest.raises(
        ValueError, match=r"lacks 1 weights of the model, such as `lm_head\.weight`.*`model\.critic\.model\.path`"
    ):
        build_scorer(ModelConfig(path=str(untied)), "policy", trainable=True)


def test_a_value_head_of_another_size_is_refused(runs, tmp_path):
    (tmp_path / "value_head.safetensors").write_bytes(save({"weight": torch.zeros(1, 16)}))
    config = runs["lora-shared"].module.policy_config
    config = replace(config, lora=replace(config.lora, adapter_path=str(tmp_path)))

    with pytest.raises(ValueError, match="is not a value head of `path: .*`: its size is another. Remove it"):
        build_scorer(config, "policy_and_value", trainable=True)


def test_responses_end_at_the_same_tokens_again(tmp_path, tiny_folder, chat_file):
    """Where no `generation_config.json` is, none is made up: the model's own default of 2 is another token's here."""
    base = shutil.copytree(tiny_folder, tmp_path / "base")
    (base / "generation_config.json").unlink()
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | {"eos_token_id": 9}))
    saves = HFCheckpoint(str(tmp_path / "hf"))
    trainer = make_trainer(tmp_path, saves, max_steps=1, enable_checkpointing=True)

    trainer.fit(make_sft(base), datamodule=make_chats(chat_file))

    assert make_sft(tmp_path / "hf" / "last").eos_token_ids == make_sft(base).eos_token_ids
