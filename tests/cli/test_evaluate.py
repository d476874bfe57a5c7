"""``verl-fit evaluate``: its words, and what tasks hear of a run's policy."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.runs import make_ppo, make_rollout, make_settings, make_trainer
from tests.tolerances import assert_near
from verl_lightning.cli.command import main
from verl_lightning.cli.evaluation.command import RESULTS_FILE, parse
from verl_lightning.cli.evaluation.run import Evaluation, NoBatches
from verl_lightning.rollout.base import SamplingConfig

GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=5)


def asked(tmp_path, folder, ask):
    """What a function finds out about the policy of a tiny folder."""
    found = []
    trainer = make_trainer(tmp_path, make_rollout(), Evaluation(lambda policy: found.append(ask(policy)) or []))
    trainer.predict(make_ppo(folder), NoBatches(), return_predictions=False)
    return found[0]


def test_log_probs_are_those_of_transformers(tmp_path, tiny_folder):
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    pairs = [([5, 6, 7], [8, 9]), ([4], [3, 2, 1]), ([9, 9], [9])]

    found = asked(tmp_path, tiny_folder, lambda policy: policy.scored(pairs))

    for value, (prompt, response) in zip(found, pairs, strict=True):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).sum()
        assert_near(torch.tensor(value), expected)


def test_greedy_choices_are_known_and_answers_end_where_the_task_says(tmp_path, tiny_folder):
    def ask(policy):
        whole = asyncio.run(policy.respond([5, 6, 7], GREEDY))
        tokens = policy.tokenizer(whole.text, add_special_tokens=False)["input_ids"]
        cut = asyncio.run(policy.respond([5, 6, 7], GREEDY, until=[whole.text[-1]]))
        return whole, cut, policy.are_greedy([([5, 6, 7], tokens[:2]), ([5, 6, 7], [tokens[0], tokens[1] ^ 1])])

    whole, cut, greedy = asked(tmp_path, tiny_folder, ask)

    assert whole.num_tokens == 5
    assert cut.text == whole.text.partition(whole.text[-1])[0]
    assert greedy == [True, False]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config", "grpo"], "needs `--tasks` for lm-eval or `--inspect` for inspect"),
        (["--tasks", "a", "--inspect", "b.py", "--config", "grpo"], "one of them"),
        (["--tasks", "a", "--limit", "0", "--config", "grpo"], "`--limit` must be at least 1, got 0"),
        (["--tasks", "a", "--num_fewshot", "-1", "--config", "grpo"], "`--num_fewshot` must not be negative"),
        (["--inspect", "b.py", "--num_fewshot", "2", "--config", "grpo"], "`--num_fewshot` is an option of lm-eval's"),
        (["--tasks", "a", "--include_path", "nowhere", "--config", "grpo"], "`--include_path nowhere` is no folder"),
        (["--tasks", "a"], "`verl-fit evaluate` needs the usual settings too"),
        (["--config", "grpo", "--tasks", "a"], "`--tasks` is an option of `verl-fit evaluate`: put it before"),
    ],
)
def test_wrong_words_are_refused_at_once(argv, message):
    with pytest.raises(ValueError, match=message):
        parse(argv)


@pytest.mark.parametrize(("flag", "package"), [("--tasks", "lm_eval"), ("--inspect", "inspect_ai")])
def test_a_missing_package_is_named(flag, package, monkeypatch):
    monkeypatch.setattr("verl_lightning.needs.has_package", lambda module: module != package)
    with pytest.raises(ValueError, match=f"evaluate {flag}` needs the package `{package}`, .* `pip install {package}`"):
        parse([flag, "gsm8k", "--config", "grpo"])


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
def test_tasks_of_lm_eval_are_answered_by_the_engine(tmp_path, tiny_folder, prompt_file, capsys, monkeypatch):
    """By hand, where `lm_eval` is installed beside this package."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": "sort 21", "answer": "12", "choices": ["12", "21"]}] * 3
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}}, "test_split": "test"}
    task |= {"doc_to_text": "{{question}}", "doc_to_target": "{{answer}}", "task": "own_generation"}
    task |= {"output_type": "generate_until", "metric_list": [{"metric": "exact_match"}]}
    choice = task | {"task": "own_choice", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}
    choice |= {"doc_to_target": 0, "metric_list": [{"metric": "acc"}]}
    for each in (task | {"generation_kwargs": {"until": ["x"], "max_gen_toks": 4}}, choice):
        (tmp_path / f"{each['task']}.yaml").write_text(yaml.safe_dump(each))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(make_settings(tiny_folder, prompt_file)))

    with pytest.raises(SystemExit, match="0"):
        main(["evaluate", "--tasks", "own_generation,own_choice", "--include_path", ".", "--config", "run.yaml"])

    (results,) = tmp_path.rglob(RESULTS_FILE)
    assert {score["task"]: score["samples"] for score in json.loads(results.read_text())} == {
        "own_generation": 3,
        "own_choice": 3,
    }
    assert "own_choice" in capsys.readouterr().out
