"""Learning from a teacher's distributions: on the policy's own responses, and on written ones."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.testing import assert_close
from transformers import LlamaForCausalLM

from tests.runs import (
    Recorder,
    make_chats,
    make_model_config,
    make_ppo,
    make_prompts,
    make_reward,
    make_rollout,
    make_sft,
    make_trainer,
)
from tests.tiny import write_prompt_file, write_tiny_folder
from verl_lightning.algorithms.advantages.grpo import GRPO
from verl_lightning.faults import RunError
from verl_lightning.models.config import OptimConfig
from verl_lightning.modules.ppo_config import UpdateConfig
from verl_lightning.modules.teacher_config import TeacherConfig

LOSS = "actor/distillation_loss"


@pytest.fixture(autouse=True)
def _seed():
    seed_everything(0, verbose=False)


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    """A wider model with other weights."""
    return write_tiny_folder(tmp_path_factory.mktemp("teacher") / "model", seed=7, hidden_size=48)


def fitted(tmp_path, folder, prompt_file, *, max_steps=2, lr=1e-2, **parts):
    recorder, actor = Recorder(), make_model_config(folder, optim=OptimConfig(lr=lr, weight_decay=0.0))
    parts = {"actor": actor, "advantage": None, "reward": None, "update": UpdateConfig(micro_batch_size=16)} | parts
    module = make_ppo(folder, **parts)
    trainer = make_trainer(tmp_path, make_rollout(), recorder, max_steps=max_steps)
    trainer.fit(module, datamodule=make_prompts(prompt_file))
    return module, recorder


@pytest.mark.parametrize("top_k", [None, 5])
def test_the_student_comes_nearer_to_its_teacher(top_k, tmp_path, tiny_folder, teacher_folder, prompt_file):
    teacher = TeacherConfig(path=str(teacher_folder), top_k=top_k)

    _, recorder = fitted(tmp_path, tiny_folder, prompt_file, teacher=teacher, max_steps=12)

    losses = recorder.column(LOSS)
    assert losses[-1] < 0.7 * losses[0]


def test_a_model_is_its_own_teacher_and_learns_nothing(tmp_path, tiny_folder, prompt_file):
    teacher = TeacherConfig(path=str(tiny_folder), beta=0.5)

    _, recorder = fitted(tmp_path, tiny_folder, prompt_file, teacher=teacher, max_steps=1)

    assert recorder.column(LOSS) == pytest.approx([0.0], abs=1e-6)


def test_micro_batches_change_nothing(tmp_path, tiny_folder, teacher_folder, prompt_file):
    teacher = TeacherConfig(path=str(teacher_folder), aggregation="seq-mean-token-mean")
    weights = []
    for size in (16, 3):
        update = UpdateConfig(micro_batch_size=size)
        module, _ = fitted(tmp_path, tiny_folder, prompt_file, teacher=teacher, update=update, lr=1e-3)
        weights.append([weight.detach().clone() for weight in module.policy.parameters()])

    assert_close(*weights, rtol=1e-4, atol=1e-5)


def test_rewards_and_teacher_have_their_own_denominators(tmp_path, tiny_folder, teacher_folder, prompt_file):
    """Prompts of other sources have no teacher: the divergence is a mean over none, the policy loss goes on."""
    teacher = TeacherConfig(by_source={"sort4": str(teacher_folder)}, beta=0.5)
    _, taught = fitted(tmp_path, tiny_folder, prompt_file, teacher=teacher, reward=make_reward(), advantage=GRPO())
    teacher = TeacherConfig(by_source={"another": str(teacher_folder)}, beta=0.5)
    module, alone = fitted(tmp_path, tiny_folder, prompt_file, teacher=teacher, reward=make_reward(), advantage=GRPO())
    plain, _ = fitted(tmp_path, tiny_folder, prompt_file, reward=make_reward(), advantage=GRPO())

    assert taught.column(LOSS)[0] > 1e-3
    assert LOSS not in alone.steps[0]
    assert taught.column("actor/pg_loss")[0] == pytest.approx(alone.column("actor/pg_loss")[0])
    assert_close(*([*each.policy.parameters()] for each in (module, plain)))


def test_several_teachers_each_teach_their_source(tmp_path, tiny_folder, teacher_folder):
    """The policy is its own teacher of one half, so that the divergence is half as large on the same responses."""
    rows = [json.loads(line) for line in write_prompt_file(tmp_path / "p.jsonl", num_rows=4).read_text().splitlines()]
    for row, source in zip(rows, ("one", "two") * 2, strict=True):
        row["data_source"] = source
    (tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    losses = []
    for one in (teacher_folder, tiny_folder):
        teacher = TeacherConfig(path=str(teacher_folder), by_source={"one": str(one)}, aggregation="token-sum")
        _, recorder = fitted(tmp_path, tiny_folder, tmp_path / "mixed.jsonl", teacher=teacher, max_steps=1)
        losses.append(recorder.column(LOSS)[0])

    assert 0.2 * losses[0] < losses[1] < 0.8 * losses[0]


def test_a_teacher_that_knows_the_answer_is_the_policy_itself(tmp_path, tiny_folder, prompt_file):
    teacher = TeacherConfig(context="The answer is {reward_model[ground_truth]}.")

    _, recorder = fitted(tmp_path, tiny_folder, prompt_file, teacher=teacher)

    assert recorder.column(LOSS)[0] > 1e-4


def test_a_context_names_columns_that_there_are(tmp_path, tiny_folder, prompt_file):
    with pytest.raises(ValueError, match=r"`model.teacher.context` names 'solution', which a row lacks"):
        fitted(tmp_path, tiny_folder, prompt_file, teacher=TeacherConfig(context="{solution}"))


def test_an_older_policy_teaches_and_is_resumed(tmp_path, tiny_folder, prompt_file):
    """It becomes the policy at the third iteration; a run that is resumed in between has the old one."""
    teacher = TeacherConfig(update_every=2, beta=0.5)
    update = UpdateConfig(micro_batch_size=16)

    def trained(steps, **options):
        recorder = Recorder()
        module = make_ppo(tiny_folder, actor=make_model_config(tiny_folder, lr=3e-2), teacher=teacher, update=update)
        trainer = make_trainer(tmp_path, make_rollout(), recorder, max_steps=steps)
        trainer.fit(module, datamodule=make_prompts(prompt_file), **options)
        return trainer, recorder.column(LOSS)

    _, whole = trained(4)
    trainer, first = trained(2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    _, rest = trained(4, ckpt_path=tmp_path / "half.ckpt")
    trainer, _ = trained(1)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    _, last = trained(2, ckpt_path=tmp_path / "first.ckpt")

    assert [whole[0], whole[2]] == pytest.approx([0, 0], abs=1e-6)
    assert min(whole[1], whole[3]) > 1e-4
    assert first + rest == pytest.approx(whole, rel=1e-4, abs=1e-6)
    assert last == pytest.approx(whole[1:2], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher": TeacherConfig(path="x"), "dynamic_sampling": {}}, "`model.dynamic_sampling` drops groups"),
        ({"advantage": None}, "needs `model.advantage`"),
        ({"reward": None, "teacher": TeacherConfig(path="x")}, "needs `model.reward`"),
    ],
)
def test_parts_that_do_not_fit_are_refused(options, message, tiny_folder):
    with pytest.raises(ValueError, match=message):
        make_ppo(tiny_folder, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "can't learn from itself"),
        ({"path": "x", "base_url": "http://h/v1"}, "both say who teaches"),
        ({"base_url": "http://h/v1", "served_model": "m"}, "needs `model.teacher.top_k`"),
        ({"path": "x", "api_key": "KEY"}, "`model.teacher.api_key` needs `model.teacher.base_url`"),
        ({"path": "x", "beta": 1.5}, r"must lie in \[0, 1\]"),
    ],
)
def test_teachers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TeacherConfig(**options)


def test_a_teacher_of_other_tokens_is_refused(tmp_path, tiny_folder, teacher_folder, prompt_file):
    other = shutil.copytree(teacher_folder, tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"!"', '"\\u00a1"'))

    with pytest.raises(ValueError, match=r"`model.teacher.path: .*other` has another vocabulary"):
        fitted(tmp_path, tiny_folder, prompt_file, teacher=TeacherConfig(path=str(other)))


def test_examples_are_learnt_from_a_teacher(tmp_path, tiny_folder, teacher_folder, chat_file):
    recorder = Recorder()
    teacher = TeacherConfig(path=str(teacher_folder), beta=0.0)
    actor = make_model_config(tiny_folder, optim=OptimConfig(lr=1e-2))
    module = make_sft(tiny_folder, actor=actor, teacher=teacher, cross_entropy_coef=0.0)

    trainer = make_trainer(tmp_path, recorder, max_steps=8, limit_val_batches=0)
    trainer.fit(module, datamodule=make_chats(chat_file))

    losses = recorder.column("distillation_loss")
    assert losses == pytest.approx(recorder.column("train/loss"))
    assert losses[-1] < 0.7 * losses[0]


@contextmanager
def served(folder, *, lists=True):
    """A server that tells of its prompt's tokens what vLLM's ``/v1/completions`` tells; yields its address."""
    model = LlamaForCausalLM.from_pretrained(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with torch.no_grad():
                log_probs = model(torch.tensor([asked["prompt"]])).logits[0].log_softmax(-1)
            tops = [each.topk(asked["prompt_logprobs"]) for each in log_probs[:-1]]
            listed = [{str(int(i)): {"logprob": float(v)} for v, i in zip(*top, strict=True)} for top in tops]
            choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None}
            choice |= {"prompt_logprobs": [None, *listed]} if lists else {}
            answer = {"id": "1", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_server_teaches_what_its_model_would(tmp_path, tiny_folder, teacher_folder, prompt_file):
    own = TeacherConfig(path=str(teacher_folder), top_k=5)
    _, expected = fitted(tmp_path, tiny_folder, prompt_file, teacher=own)
    with served(teacher_folder) as url:
        teacher = TeacherConfig(base_url=url, served_model="m", top_k=5)
        _, recorder = fitted(tmp_path, tiny_folder, prompt_file, teacher=teacher)

    assert recorder.column(LOSS) == pytest.approx(expected.column(LOSS), rel=1e-4)


def test_a_server_that_lists_no_tokens_is_refused(tmp_path, tiny_folder, teacher_folder, prompt_file):
    with served(teacher_folder, lists=False) as url:
        teacher = TeacherConfig(base_url=url, served_model="m", top_k=5)
        with pytest.raises(RunError, match=r"lists no tokens for its prompt"):
            fitted(tmp_path, tiny_folder, prompt_file, teacher=teacher)
