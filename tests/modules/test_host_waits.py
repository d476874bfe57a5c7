"""The host never waits for the device in a step that is not logged, but where a line here says why.

Each run has a process of its own: once ``Tensor.__getitem__`` has been replaced, tensors stay sequences in C.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import nn

from tests.host_waits import HostWaits
from tests.processes import on_ranks
from tests.runs import make_chats, make_model_config, make_ppo, make_prompts, make_rollout, make_sft, make_trainer
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.modules.ppo_config import CriticConfig, KLConfig, UpdateConfig
from verl_lightning.strategies import STRATEGIES

HOSTS = {
    "_local_scalar_dense: data.chat.padded for data.chat.batch": "a batch is made on the host",
    "tolist: types.with_lengths for data.examples.on_before_batch_transfer": "and counted there before it is sent",
}
"""What is asked of tensors that never were on a device."""

ITERATION = {
    "tolist: modules.judge.score for modules.sampling.judged": "reward functions read texts",
    "tensor on a device: modules.judge._to_tensor for modules.judge.score": "and give numbers of the host",
    "tolist: types.with_lengths for modules.experience.make": "micro-batches are cut by the lengths of responses",
    "tolist: types.with_lengths for modules.learner.learn": "and by what is left to learn from",
    "tolist: metrics._to_floats for metrics.reduce": "an iteration's metrics steer its KL weight, and are logged",
}
"""Each once in an iteration of PPO, however many updates it has."""

RANKS = ("strategies.base.gather_over_data_parallel for ", "strategies.base.largest_over_ranks for ")
"""What hosts tell one another; see `test_hosts_have_groups_of_their_own`."""

PADDED = {
    "_local_scalar_dense: models.scorer._from_padded for models.scorer._padded": "transformers asks for padding",
}
"""Of models that are not packed, at each micro-batch."""


class Watch(Callback):
    """Watches all that happens from the start of the second batch to the end of the last one."""

    def __init__(self):
        self.waits, self._stack = HostWaits(), ExitStack()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1:
            self._stack.enter_context(self.waits.watch())

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx + 1 == trainer.max_steps * trainer.accumulate_grad_batches:
            self._stack.close()


def watched(path, module, data, *callbacks, **options):
    """What would wait in a run whose steps are not logged."""
    seed_everything(0, verbose=False)
    watch = Watch()
    trainer = make_trainer(path, *callbacks, watch, log_every_n_steps=1000, **options)
    trainer.fit(module, datamodule=data)
    return dict(watch.waits.found)


def watched_sft(attention, budget, accumulate, path, folder, chats):
    module = make_sft(
        folder,
        actor=make_model_config(folder, attn_implementation=attention),
        max_tokens_per_micro_batch=budget,
    )
    return watched(path, module, make_chats(chats), accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("budget", [None, 160])
@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_steps_of_sft_wait_for_nothing(attention, budget, accumulate, tmp_path, tiny_folder, chat_file):
    """Packed by `varlen`, as on GPUs, and padded."""
    (found,) = on_ranks(1, watched_sft, attention, budget, accumulate, tmp_path, tiny_folder, chat_file)

    assert found.keys() == HOSTS.keys() | (PADDED.keys() if attention == "sdpa" else set())


@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_an_iteration_of_ppo_waits_as_often_for_any_number_of_updates(attention, tmp_path, tiny_folder, prompt_file):
    (counts,) = on_ranks(1, watched_ppo, attention, tmp_path, tiny_folder, prompt_file)

    assert counts[0] == counts[1]
    assert counts[0].keys() == ITERATION.keys()


def watched_ppo(attention, path, folder, prompts):
    """With one epoch of updates, and with three."""
    counts = []
    for epochs in (1, 3):
        model = make_model_config(folder, attn_implementation=attention)
        module = make_ppo(
            folder,
            actor=model,
            advantage=GAE(),
            critic=CriticConfig(model=model, epochs=epochs),
            kl=KLConfig(coef=0.1),
            update=UpdateConfig(mini_batch_size=2, max_tokens_per_micro_batch=100, entropy_coef=0.01, epochs=epochs),
        )
        found = watched(path, module, make_prompts(prompts), make_rollout(), max_steps=2)
        counts.append({name: count for name, count in found.items() if name not in PADDED})
    return counts


def watched_rank(strategy, path, folder, chats):
    config = make_model_config(folder, attn_implementation="varlen")
    module = make_sft(folder, actor=config, max_tokens_per_micro_batch=64)
    return watched(path, module, make_chats(chats), strategy=STRATEGIES[strategy](), devices=2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_wait_for_other_hosts_alone(strategy, tmp_path, tiny_folder, chat_file):
    for found in on_ranks(2, watched_rank, strategy, tmp_path, tiny_folder, chat_file):
        assert [name for name in found.keys() - HOSTS.keys() if not name.partition(": ")[2].startswith(RANKS)] == []


WAITS = [
    ("_local_scalar_dense", lambda x: x.sum().item()),
    ("_local_scalar_dense", lambda x: bool(x.sum() > 0)),
    ("nonzero", lambda x: x.nonzero()),
    ("index by a mask", lambda x: x[x > 0]),
    ("index_put_ by a mask", lambda x: x.clone().__setitem__(x > 0, 0.0)),
    ("index by a list", lambda x: x[[0, 2]]),
    ("tolist", lambda x: x.tolist()),
    ("cpu", lambda x: x.cpu()),
    ("to", lambda x: x.to("cpu")),
    ("tensor on a device", lambda x: torch.tensor([1, 2], device=x.device)),
    ("new_tensor on a device", lambda x: x.new_tensor([1, 2])),
]


def seen(index):
    """What is seen of a wait in the forward pass, and in a backward pass too."""
    waits, leaf, (_, wait) = HostWaits(), nn.Parameter(torch.ones(3)), WAITS[index]
    leaf.register_hook(lambda grad: None if wait(grad) is None else None)
    with waits.watch():
        wait(torch.ones(3))
        (leaf * 2).sum().backward()
    return dict(waits.found)


@pytest.mark.parametrize("index", range(len(WAITS)), ids=[name for name, _ in WAITS])
def test_waits_are_seen(index):
    (found,) = on_ranks(1, seen, index)
    assert [line.partition(":")[0] for line in found] == [WAITS[index][0]]
    assert sum(found.values()) == 2
