"""Twenty steps beside TRL's trainers on the same tokens: ``pytest -m oracle``, where TRL is installed.

Written against TRL 1.16.0.
"""

from __future__ import annotations

import json

import pytest
from lightning.pytorch import seed_everything
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.runs import Recorder, make_dpo, make_model_config, make_pairs, make_trainer
from tests.tiny import quickstart, tiny_tokenizer, uneven_pair
from verl_lightning.algorithms.preferences.dpo import DPO
from verl_lightning.algorithms.preferences.hinge import HingeDPO
from verl_lightning.algorithms.preferences.ipo import IPO
from verl_lightning.algorithms.preferences.kto import KTO
from verl_lightning.algorithms.preferences.orpo import ORPO
from verl_lightning.algorithms.preferences.robust import RobustDPO
from verl_lightning.algorithms.preferences.simpo import SimPO
from verl_lightning.models.config import OptimConfig
from verl_lightning.modules import RewardModule

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
STEPS, BATCH = 20, 4
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")
ALL = (*REWARDS, "rewards/accuracies")
SETTINGS = {
    "max_steps": STEPS, "per_device_train_batch_size": BATCH, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
    "logging_steps": 1, "report_to": "none", "bf16": False, "use_cpu": True, "gradient_checkpointing": False,
    "save_strategy": "no", "disable_tqdm": True, "max_length": 64, "train_sampling_strategy": "sequential",
}  # fmt: skip


def trl_class(name: str) -> tuple[type, type]:
    """A trainer of TRL's and the class of its settings."""
    trl = pytest.importorskip("trl")
    if name in ("CPO", "ORPO"):
        module = pytest.importorskip(f"trl.experimental.{name.lower()}")
        return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")
    return getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")


def their_steps(
    name: str, folder, rows: list[dict], tmp_path, model_class=AutoModelForCausalLM, **options
) -> list[dict[str, float]]:
    """Loss and metrics of each step under TRL."""
    datasets = pytest.importorskip("datasets")
    trainer_class, config_class = trl_class(name)
    losses = []

    class Recording(trainer_class):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss))
            return loss

    args = config_class(output_dir=str(tmp_path / name), **SETTINGS | options)
    model, tokenizer = model_class.from_pretrained(folder), tiny_tokenizer()
    trainer = Recording(
        model=model, args=args, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [entry | {"loss": loss} for entry, loss in zip(logged, losses, strict=True)]


def our_steps(make_module, folder, rows: list[dict], tmp_path) -> list[dict[str, float]]:
    """Metrics of each step of ours."""
    seed_everything(0, verbose=False)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recorder, actor = Recorder(), make_model_config(folder, optim=OptimConfig(lr=1e-3, weight_decay=0.0))
    trainer = make_trainer(tmp_path, recorder, max_steps=STEPS)
    trainer.fit(make_module(actor), datamodule=make_pairs(tmp_path / "rows.jsonl"))
    return recorder.steps


def plain_rows(*, prompt: str = "") -> list[dict]:
    """Eighty pairs as plain texts."""
    questions = quickstart.sort_questions()[: STEPS * BATCH]
    rows = [quickstart.prompt_row(question, split="train", index=index) for index, question in enumerate(questions)]
    pairs = [uneven_pair(row, 1 + index % 3) for index, row in enumerate(rows)]
    return [
        {
            "prompt": prompt or pair["prompt"][0]["content"],
            "chosen": pair["chosen"][0]["content"],
            "rejected": pair["rejected"][0]["content"],
        }
        for pair in pairs
    ]


CASES = {
    "sigmoid": ("DPO", {"loss_type": ["sigmoid"], "beta": 0.3}, DPO(beta=0.3), ALL),
    "hinge": ("DPO", {"loss_type": ["hinge"], "beta": 0.3}, HingeDPO(beta=0.3), ALL),
    "ipo": ("DPO", {"loss_type": ["ipo"], "beta": 0.3}, IPO(beta=0.3), ALL),
    "robust": ("DPO", {"loss_type": ["robust"], "label_smoothing": 0.2}, RobustDPO(label_smoothing=0.2), ALL),
    "simpo": (
        "CPO",
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0},
        SimPO(beta=2.0, gamma=0.5),
        ALL,
    ),
    "orpo": ("ORPO", {"beta": 0.2}, ORPO(beta=0.2), (*ALL, "nll_loss", "log_odds_ratio", "log_odds_chosen")),
    "kto": ("KTO", {"undesirable_weight": 1.5, "beta": 0.3}, KTO(undesirable_weight=1.5, beta=0.3), ("kl",)),
}


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_are_those_of_trl(tmp_path, tiny_folder, case):
    name, options, loss, metrics = CASES[case]
    # TRL's ORPO also trains the prompt, of which one token leaves nothing.
    rows = plain_rows(prompt="=" if case == "orpo" else "")
    if case == "kto":
        rows = [
            {"prompt": row["prompt"], "completion": row[key], "label": key == "chosen"}
            for index, row in enumerate(rows)
            for key in [("chosen", "rejected")[index // 2 % 2]]
        ]
    theirs = their_steps(name, tiny_folder, rows, tmp_path, **options)
    ours = our_steps(lambda actor: make_dpo(tiny_folder, actor=actor, loss=loss), tiny_folder, rows, tmp_path)
    assert [step["train/loss"] for step in ours] == pytest.approx([step["loss"] for step in theirs], rel=1e-5, abs=1e-5)
    for metric in metrics:
        expected = [step[metric] for step in theirs]
        assert [step[metric] for step in ours] == pytest.approx(expected, rel=1e-4, abs=2e-4), metric


def test_twenty_steps_of_a_reward_model_are_those_of_trl(tmp_path, reward_folder):
    """With margins, and with rewards drawn to a mean of 0."""
    rows = [row | {"margin": index % 4 / 4} for index, row in enumerate(plain_rows())]
    options = {"center_rewards_coefficient": 0.01, "model_class": AutoModelForSequenceClassification}
    theirs = their_steps("Reward", reward_folder, rows, tmp_path, **options)
    ours = our_steps(lambda actor: RewardModule(actor, center_rewards_coefficient=0.01), reward_folder, rows, tmp_path)
    assert [step["train/loss"] for step in ours] == pytest.approx([step["loss"] for step in theirs], rel=1e-5, abs=1e-5)
    for metric in ("accuracy", "margin", "mean_reward"):
        expected = [step[metric] for step in theirs]
        assert [step[metric] for step in ours] == pytest.approx(expected, rel=1e-4, abs=2e-4), metric
