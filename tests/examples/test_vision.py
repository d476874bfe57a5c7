"""The example with pictures: what its script writes, and a step of each of its files on that."""

from __future__ import annotations

import csv
import json

import pytest
from PIL import Image

from tests.processes import verl_fit
from tests.tiny import ROOT, load_script

vision = load_script(ROOT / "examples" / "vision" / "prepare.py")
TINY = "--trainer.enable_progress_bar false --trainer.enable_model_summary false --trainer.logger false"
SIZES = "--data.prompts_per_step 2 --data.val_batch_size 2 --model.update.mini_batch_size 2"
SIZES += " --rollout.sampling.num_samples 2 --model.actor.optim.warmup_steps 0"


def test_pictures_show_what_rows_say(tmp_path):
    vision.write_rows(tmp_path, num_sft=2, num_train=4, num_val=2)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]

    assert len(rows) == 4
    for row in rows:
        asked = row["prompt"][0]["content"].removeprefix("<image>")
        counts = {color: count for count, color in Image.open(tmp_path / row["images"][0]).getcolors()}
        color = {"red": (255, 0, 0), "blue": (0, 0, 255)}[asked]
        assert counts.get(color, 0) == int(row["ground_truth"]) * vision.CELL**2


def test_its_files_train_one_after_the_other(tmp_path):
    folder = tmp_path / "runs" / "vision"
    vision.write_rows(folder, num_sft=4, num_train=4, num_val=2)
    vision.write_model(folder / "model", hidden_size=32)
    words = [*TINY.split(), "--trainer.max_steps", "1"]

    verl_fit("--config", str(ROOT / "examples/vision/sft.yaml"), *words, "--data.batch_size", "2", folder=tmp_path)
    verl_fit("--config", str(ROOT / "examples/vision/grpo.yaml"), *words, *SIZES.split(), folder=tmp_path)
    assert (folder / "grpo" / "hf" / "last" / "preprocessor_config.json").is_file()


@pytest.mark.slow
@pytest.mark.seeds
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_learns_to_count_squares(tmp_path, seed):
    """SFT and GRPO take 140 seconds of one core."""
    folder, words = tmp_path / "runs" / "vision", ["--seed_everything", str(seed), *TINY.split()[:4]]
    vision.write_rows(folder, seed=seed)
    vision.write_model(folder / "model", seed=seed)

    for name in ("sft", "grpo"):
        verl_fit("--config", str(ROOT / f"examples/vision/{name}.yaml"), *words, folder=tmp_path)
    (log,) = (folder / "grpo").glob("*/metrics.csv")
    with log.open() as lines:
        curve = [float(row["val/reward"]) for row in csv.DictReader(lines) if row["val/reward"]]
    assert curve[-1] > curve[0] + 0.3
