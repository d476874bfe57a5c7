"""Every metric that runs log stands on the page of metrics."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import LearningRateMonitor

from tests.runs import (
    make_chats,
    make_dpo,
    make_model_config,
    make_pairs,
    make_ppo,
    make_prompts,
    make_reward,
    make_rollout,
    make_sft,
    make_trainer,
)
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.callbacks import FinalValidation
from verl_lightning.loggers import ResumableCSVLogger, read_rows
from verl_lightning.modules.ppo_config import CriticConfig, KLConfig

PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
NAMES = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
LIGHTNINGS = {"epoch", "step"}


def patterns() -> list[re.Pattern[str]]:
    """Patterns of the names on the page."""
    written = []
    for name in NAMES:
        parts = [part[1:-1].split(",") if part[:1] == "{" else [part] for part in re.split(r"({[^}]*})", name)]
        written += ["".join(each) for each in product(*parts)]
    return [re.compile(".+".join(map(re.escape, re.split(r"<\w+>", name)))) for name in written]


@pytest.mark.parametrize("kind", ["ppo", "sft", "dpo"])
def test_what_a_run_logs_stands_on_the_page(kind, tmp_path, tiny_folder, prompt_file, chat_file, pair_file):
    logger = ResumableCSVLogger(str(tmp_path), version="run")
    options = {"max_steps": 1, "val_check_interval": 1, "limit_val_batches": 1, "check_val_every_n_epoch": None}
    own = [FinalValidation(), LearningRateMonitor()]
    if kind == "ppo":
        critic = CriticConfig(model=make_model_config(tiny_folder))
        parts = {"advantage": GAE(), "critic": critic, "kl": KLConfig(), "reward": make_reward("parts_of_even_share")}
        module, data, own = (
            make_ppo(tiny_folder, **parts),
            make_prompts(prompt_file, prompt_file),
            [*own, make_rollout()],
        )
    elif kind == "sft":
        module, data = make_sft(tiny_folder), make_chats(chat_file, chat_file)
    else:
        module, data = make_dpo(tiny_folder), make_pairs(pair_file, pair_file)

    make_trainer(tmp_path, *own, logger=logger, log_every_n_steps=1, **options).fit(module, datamodule=data)

    logged = {name for row in read_rows(tmp_path / "run/metrics.csv") for name in row} - LIGHTNINGS
    assert len(logged) > 15
    assert [name for name in sorted(logged) if not any(pattern.fullmatch(name) for pattern in patterns())] == []


def test_no_name_stands_twice():
    assert len(NAMES) == len(set(NAMES))
