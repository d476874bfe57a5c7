"""Runs on rows with images: what is learnt, sampled, saved and refused."""

from __future__ import annotations

import base64
import json
import re

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.testing import assert_close

from tests.processes import on_ranks
from tests.runs import (
    Recorder,
    make_chats,
    make_dpo,
    make_model_config,
    make_pairs,
    make_ppo,
    make_prompts,
    make_rollout,
    make_sft,
    make_trainer,
)
from tests.tiny import ROOT
from tests.vision.tiny_vision import squares, write_vision_folder
from tests.vision.vision_ranks import learn, learn_on_two, sample
from verl_lightning.algorithms.corrections.truncated_importance_sampling import TruncatedImportanceSampling
from verl_lightning.callbacks import HFCheckpoint
from verl_lightning.callbacks.placement import Beside
from verl_lightning.data.image_files import ImagesConfig
from verl_lightning.data.prompts import tokenize_prompts
from verl_lightning.data.rows import read_prompt_rows
from verl_lightning.models.processor import image_processor
from verl_lightning.models.tokenizer import load_tokenizer
from verl_lightning.modules.ppo_config import DynamicSamplingConfig


@pytest.fixture(autouse=True)
def _seed():
    seed_everything(0, verbose=False)


@pytest.fixture(scope="module", params=["qwen2_5_vl"])
def folder(request, tmp_path_factory):
    return write_vision_folder(tmp_path_factory.mktemp(request.param), request.param)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def counting_rows(folder, *, num_rows=16):
    """Questions with a picture in a file beside them, in the row, and, each third, without one."""
    rows = []
    for index in range(num_rows):
        count, size = 1 + index % 3, [(16, 16), (24, 16)][index % 2]
        picture = folder / f"{index}.png"
        squares(count, size=size).save(picture)
        url = "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
        asked = [
            {"prompt": "<image>count", "images": [picture.name]},
            {
                "prompt": [
                    {"role": "user", "content": [{"type": "image", "image": url}, {"type": "text", "text": "count"}]}
                ]
            },
            {"prompt": "no picture"},
        ][index % 3]
        rows.append(asked | {"ground_truth": str(count), "completion": str(count)})
    return write_rows(folder / "rows.jsonl", rows)


def test_sft_learns_from_rows_with_and_without_images(tmp_path, folder):
    recorder, module = Recorder(), make_sft(folder, actor=make_model_config(folder, lr=1e-2))
    export = HFCheckpoint(dirpath=str(tmp_path / "hf"))
    trainer = make_trainer(tmp_path, recorder, export, max_steps=12, enable_checkpointing=True)
    trainer.fit(module, datamodule=make_chats(counting_rows(tmp_path), batch_size=4, max_length=48))
    exported = image_processor(str(tmp_path / "hf" / "last"))

    losses = recorder.column("train/loss")
    assert losses[-1] < losses[0] / 2
    assert exported.text((24, 16)) == image_processor(str(folder)).text((24, 16))
    pixels = [each.read([squares(1)]).pixel_values for each in (exported, image_processor(str(folder)))]
    assert_close(*pixels, rtol=0, atol=0)


@pytest.mark.parametrize("packing", ["auto", "always"])
def test_grpo_samples_what_it_scores(tmp_path, folder, packing):
    recorder = Recorder()
    module = make_ppo(folder, actor=make_model_config(folder, lr=1e-3, packing=packing))
    trainer = make_trainer(tmp_path, make_rollout(canary_limit=1e-5), recorder, max_steps=2)
    trainer.fit(module, datamodule=make_prompts(counting_rows(tmp_path), max_prompt_length=40))

    assert recorder.column("rollout/canary_gap") == pytest.approx([0, 0], abs=1e-5)
    assert recorder.column("rollout_corr/effective_sample_size") == pytest.approx([1, 1], abs=1e-4)
    # Three marks, six tokens of a picture of 24 by 16 pixels between two, and five letters.
    assert recorder.column("prompt_length/max")[0] == 3 + 6 + 2 + 5


def test_two_ranks_learn_as_one_whether_or_not_they_have_images(tmp_path, folder):
    """One row of each step has no image, so a rank's tower reads nothing; its weights are trained here."""
    rows = [json.loads(line) for line in counting_rows(tmp_path).read_text().splitlines()]
    paired = [row for pair in zip(rows[0::3], rows[2::3], strict=False) for row in pair]
    file = write_rows(tmp_path / "paired.jsonl", paired)

    expected = learn("auto", 1, folder, file) | sample("auto", 1, folder, file)
    for found in on_ranks(2, learn_on_two, folder, file)[0].values():
        for name, series in expected.items():
            assert found[name] == pytest.approx(series, rel=1e-4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "<image>a", "images": ["https://a.b/c.png"]}, "nothing is fetched from the network"),
        ({"prompt": "<image>a", "images": ["no.png"]}, r"image 1 of 1 in row 1 .* is missing: there is no file"),
        ({"prompt": "<image>a", "images": ["rows.jsonl"]}, "image 1 of 1 in row 1 .* can't be read as a picture"),
        ({"prompt": "a", "images": ["0.png"]}, "have 0 places for images .* column holds 1 images"),
        ({"prompt": "<image><image>", "images": ["0.png"]}, "have 2 places for images .* column holds 1 images"),
        ({"prompt": "<image><|image_pad|>", "images": ["0.png"]}, "2 placeholders `<|image_pad|>` for the 1 images"),
        ({"prompt": "<image>a", "images": ["0.png"], "videos": ["a.mp4"]}, "The column `videos` in row 1"),
        ({"prompt": "<image>a", "images": ["0.png"], "image": "0.png"}, "There are both `images` and `image` in row 1"),
        ({"prompt": "<image>a", "images": "[0.png]"}, "Expected a list of images as JSON text in `images` in row 1"),
        ({"prompt": "a", "images": [3]}, "have 0 places for images"),
        ({"prompt": "<image>", "images": [3]}, "Expected the image 1 of 1 in row 1 .* to be a path relative"),
    ],
)
def test_rows_whose_images_would_get_lost_are_refused(tmp_path, folder, row, message):
    squares(1).save(tmp_path / "0.png")
    file = write_rows(tmp_path / "rows.jsonl", [row | {"ground_truth": "1", "completion": "1"}])
    trainer = make_trainer(tmp_path)

    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        trainer.fit(make_sft(folder), datamodule=make_chats(file, batch_size=1))


@pytest.mark.parametrize(
    ("module", "data", "message"),
    [
        ({"packing": "always", "path": "gemma3"}, {}, "images in row 1 .* `packing: always` does not fit: a `gemma3`"),
        ({"path": "text"}, {"images": ImagesConfig(allow_urls=True)}, "`data.images` is set, but the policy reads no"),
        ({}, {"max_length": 8, "overlong": "truncate"}, "`overlong: truncate` may cut through its images"),
        ({"train_vision_tower": True, "path": "text"}, {}, "does not fit a `llama`, which has none"),
    ],
)
def test_options_that_do_not_fit_images_are_refused(tmp_path, folder, tiny_folder, module, data, message):
    squares(1).save(tmp_path / "0.png")
    kind, trainer = module.pop("path", "qwen2_5_vl"), make_trainer(tmp_path)
    shown = {"prompt": "a"} if kind == "text" else {"prompt": "<image>a", "images": ["0.png"]}
    file = write_rows(tmp_path / "rows.jsonl", [shown | {"ground_truth": "1", "completion": "1"}])
    used = {"text": tiny_folder, "qwen2_5_vl": folder}.get(kind) or write_vision_folder(tmp_path / kind, kind)

    with pytest.raises((ValueError, MisconfigurationException), match=message):
        trainer.fit(
            make_sft(used, actor=make_model_config(used, **module)), datamodule=make_chats(file, batch_size=1, **data)
        )


def test_dpo_learns_from_pairs_about_images(tmp_path, folder):
    squares(1).save(tmp_path / "0.png")
    rows = [
        {"prompt": [{"role": "user", "content": "<image>count"}], "images": ["0.png"]}
        | {name: [{"role": "assistant", "content": said}] for name, said in (("chosen", "1"), ("rejected", "2"))}
    ]
    file, recorder = write_rows(tmp_path / "pairs.jsonl", rows * 4), Recorder()
    module = make_dpo(folder, actor=make_model_config(folder, lr=1e-2), reference_cache=str(tmp_path / "reference"))
    make_trainer(tmp_path, recorder, max_steps=4).fit(module, datamodule=make_pairs(file, batch_size=4, max_length=32))

    assert recorder.column("rewards/margins")[-1] > 0.1


@pytest.mark.parametrize(
    ("settings", "rollout"),
    [
        ({"dynamic_sampling": DynamicSamplingConfig()}, {}),
        ({"corrections": [TruncatedImportanceSampling()]}, {"max_staleness": 1}),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, folder, settings, rollout):
    """Groups of dynamic sampling and responses ahead wait in the checkpoint, as the canary's prompts do."""
    rows = counting_rows(tmp_path, num_rows=12)

    def run(max_steps, **options):
        seed_everything(0, verbose=False)
        keep = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=1, save_top_k=-1, filename="{step}")
        module = make_ppo(folder, **settings)
        callbacks = make_rollout(canary_limit=1e-3, **rollout), keep
        trainer = make_trainer(tmp_path, *callbacks, max_steps=max_steps, enable_checkpointing=True)
        trainer.fit(module, datamodule=make_prompts(rows, max_prompt_length=40), **options)
        return module.state_dict()

    whole = run(3)
    resumed = run(3, ckpt_path=str(tmp_path / "kept" / "step=1.ckpt"))
    assert_close(resumed, whole, rtol=0, atol=0)


def test_an_engine_in_another_process_sees_the_same_images(tmp_path, folder):
    """While the policy learns, one step ahead."""
    recorder = Recorder()
    rollout = make_rollout(canary_limit=1e-5, placement=Beside(), max_staleness=1)
    module = make_ppo(folder, corrections=[TruncatedImportanceSampling()])
    trainer = make_trainer(tmp_path, rollout, recorder, max_steps=2)
    trainer.fit(module, datamodule=make_prompts(counting_rows(tmp_path), max_prompt_length=40))

    assert recorder.column("rollout/canary_gap") == pytest.approx([0, 0], abs=1e-5)
    assert recorder.column("rollout/staleness/max") == [0, 1]


def test_the_rows_of_the_documentation_are_the_same_to_the_model(tmp_path, folder):
    (tmp_path / "squares").mkdir()
    squares(3).save(tmp_path / "squares" / "1.png")
    (shown,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "vision.md").read_text(), re.DOTALL)
    (tmp_path / "rows.jsonl").write_text(shown)
    rows = read_prompt_rows(str(tmp_path / "rows.jsonl"), None)
    prompts = tokenize_prompts(rows, load_tokenizer(folder), None, image_processor(str(folder)))

    assert len(prompts) == 3
    assert all(prompt.ids == prompts[0].ids and len(prompt.shown.files) == 1 for prompt in prompts)
    assert {prompt.row.values["images"][0] for prompt in prompts} == {str(tmp_path / "squares" / "1.png")}


def test_a_placeholder_without_images_is_told(tmp_path, folder):
    rows = read_prompt_rows(
        str(write_rows(tmp_path / "rows.jsonl", [{"prompt": "<image>a", "ground_truth": "1"}])), None
    )

    with pytest.warns(UserWarning, match=r"`<image>` in messages whose row has no column `images`"):
        (prompt,) = tokenize_prompts(rows, load_tokenizer(folder), None, image_processor(str(folder)))
    assert prompt.shown is None
