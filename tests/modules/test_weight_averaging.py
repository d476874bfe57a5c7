"""What is validated, saved and exported with Lightning's weight averaging: the same weights."""

from __future__ import annotations

import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.runs import Recorder, make_chats, make_model_config, make_sft, make_trainer
from verl_lightning.callbacks import HFCheckpoint
from verl_lightning.cli.export import export
from verl_lightning.models.config import LoraConfig
from verl_lightning.strategies import STRATEGIES, MegatronStrategy

pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint"),
]
EACH_STEP = {"val_check_interval": 1, "check_val_every_n_epoch": None, "enable_checkpointing": True}
FEW = {"limit_val_batches": 2, "limit_test_batches": 2}
LORA = LoraConfig(rank=4, alpha=8.0)


def train(tmp_path, folder, chats, *callbacks, lora=None, ckpt_path=None, **options):
    """Three steps, validated and saved after each; returns the trainer, the module and the losses by step."""
    module = make_sft(folder, actor=make_model_config(folder, lr=1e-2, lora=lora))
    recorder = Recorder()
    saves = [
        HFCheckpoint(str(tmp_path / "hf"), monitor="val/loss", mode="min", save_top_k=-1),
        ModelCheckpoint(tmp_path / "trainer", "{step}", monitor="val/loss", save_top_k=-1),
    ]
    trainer = make_trainer(tmp_path, *callbacks, *saves, recorder, **EACH_STEP | FEW | options)
    trainer.fit(module, datamodule=make_chats(chats, chats), ckpt_path=ckpt_path)
    return trainer, module, {f"step={i + 1}": each["val/loss"] for i, each in enumerate(recorder.validations)}


def loss_of(tmp_path, chats, config, ckpt_path=None):
    """Of a model that nothing averages."""
    (metrics,) = make_trainer(tmp_path, **FEW).validate(
        make_sft("", actor=config), datamodule=make_chats(chats, chats), ckpt_path=ckpt_path, verbose=False
    )
    return metrics["val/loss"]


@pytest.mark.parametrize(
    ("averaging", "strategy"), [(EMAWeightAveraging(decay=0.7), "auto"), (WeightAveraging(), "ddp")]
)
def test_what_is_validated_is_what_is_saved_and_exported(tmp_path, tiny_folder, chat_file, averaging, strategy):
    _, _, losses = train(tmp_path, tiny_folder, chat_file, averaging, strategy=strategy)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"model": {"init_args": {"actor": {"path": str(tiny_folder)}}}}))

    for step, loss in losses.items():
        saved, exported = tmp_path / "trainer" / f"{step}.ckpt", tmp_path / "exported" / step
        export(saved, exported, to="hf", config=config)
        tiny = make_model_config(tiny_folder)
        assert loss_of(tmp_path, chat_file, make_model_config(tmp_path / "hf" / step)) == loss
        assert loss_of(tmp_path, chat_file, make_model_config(exported)) == loss
        assert loss_of(tmp_path, chat_file, tiny, saved) == loss
    last = make_model_config(tmp_path / "hf" / "last")
    assert loss_of(tmp_path, chat_file, last) == losses["step=3"]
    assert len(set(losses.values())) == 3


def test_adapters_are_averaged_beside_the_very_base(tmp_path, tiny_folder, chat_file):
    """An average of equal numbers differs by rounding: the base would be another one."""
    _, module, losses = train(tmp_path, tiny_folder, chat_file, EMAWeightAveraging(decay=0.7), lora=LORA)

    base = load_file(tiny_folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    now = dict(module.policy.backbone.named_parameters())[name.replace(".weight", ".base_layer.weight")]
    assert_close(now.data, base[name], rtol=0, atol=0)
    for step in ("step=2", "step=3", "last"):
        lora = LoraConfig(rank=4, alpha=8.0, adapter_path=str(tmp_path / "hf" / step))
        loss = loss_of(tmp_path, chat_file, make_model_config(tiny_folder, lora=lora))
        assert loss == losses.get(step, losses["step=3"])
    saved = torch.load(tmp_path / "trainer" / "step=3.ckpt", weights_only=True)
    assert not any("base_layer" in key for key in [*saved["state_dict"], *saved["current_model_state"]])


def test_an_evaluation_after_the_fit_reads_the_averaged_weights(tmp_path, tiny_folder, chat_file):
    trainer, module, losses = train(tmp_path, tiny_folder, chat_file, EMAWeightAveraging(decay=0.7))
    data = make_chats(chat_file, chat_file, test_files=str(chat_file))

    for path in (None, tmp_path / "trainer" / "step=2.ckpt"):
        (tested,) = trainer.test(module, datamodule=data, ckpt_path=path, verbose=False)
        (validated,) = trainer.validate(module, datamodule=data, ckpt_path=path, verbose=False)
        assert tested["test/loss"] == validated["val/loss"] == losses["step=2" if path else "step=3"]


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, tiny_folder, chat_file, lora):
    averaging = EMAWeightAveraging(decay=0.7)  # one for three fits: it must begin anew

    _, whole, losses = train(tmp_path / "whole", tiny_folder, chat_file, averaging, lora=lora, max_steps=4)
    train(tmp_path / "first", tiny_folder, chat_file, averaging, lora=lora, max_steps=2)
    path = tmp_path / "first" / "trainer" / "step=2.ckpt"

    _, resumed, rest = train(tmp_path, tiny_folder, chat_file, averaging, lora=lora, max_steps=4, ckpt_path=path)

    assert_close(dict(resumed.state_dict()), dict(whole.state_dict()), rtol=0, atol=0)
    assert list(rest.values()) == [losses["step=3"], losses["step=4"]]


def test_a_run_that_averages_no_more_goes_on_from_the_weights_in_training(tmp_path, tiny_folder, chat_file):
    _, plain, _ = train(tmp_path / "plain", tiny_folder, chat_file)
    train(tmp_path / "averaged", tiny_folder, chat_file, EMAWeightAveraging(decay=0.7), max_steps=2)
    path = tmp_path / "averaged" / "trainer" / "step=2.ckpt"

    _, resumed, _ = train(tmp_path, tiny_folder, chat_file, ckpt_path=path)

    assert_close(dict(resumed.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("callbacks", "strategy", "message"),
    [
        ([EMAWeightAveraging(), WeightAveraging()], "auto", r"both put their averages.*Keep one of them"),
        (
            [EMAWeightAveraging()],
            "fsdp",
            r"`EMAWeightAveraging` copies whole models, but under `FSDPS.*Use `--strategy ddp`",
        ),
    ],
)
def test_averaging_that_cannot_be_right_is_refused(tmp_path, tiny_folder, chat_file, callbacks, strategy, message):
    strategy = STRATEGIES[strategy]() if strategy in STRATEGIES else strategy
    with pytest.raises(MisconfigurationException, match=message):
        train(tmp_path, tiny_folder, chat_file, *callbacks, strategy=strategy)
    assert not MegatronStrategy.holds_whole_models
