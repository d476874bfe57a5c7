"""A run of several processes that is told to stop ends everywhere at the same batch."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.processes import on_ranks
from tests.runs import make_chats, make_sft, make_trainer
from verl_lightning.strategies import STRATEGIES
from verl_lightning.strategies.host_groups import host_group


class Terminate(Callback):
    """One rank alone gets the signal, in the middle of its second step."""

    def on_before_backward(self, trainer, module, loss):
        if trainer.global_step == 1 and trainer.global_rank == 1:
            signal.raise_signal(signal.SIGTERM)


def train(strategy, path, folder, chats):
    trainer = make_trainer(path, Terminate(), strategy=STRATEGIES[strategy](), devices=2, max_steps=5)
    with pytest.raises(SIGTERMException):
        trainer.fit(make_sft(folder), make_chats(chats))
    return trainer.global_step, trainer.received_sigterm


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_end_at_one_batch(strategy, tmp_path, tiny_folder, chat_file):
    assert on_ranks(2, train, strategy, tmp_path, tiny_folder, chat_file) == [(2, True)] * 2


def hosts_of():
    """What the hosts of a group whose backend is another one tell one another."""
    dist.init_process_group("cpu:gloo")
    rank = dist.get_rank()
    dist.new_group([0])  # one rank may be in more groups than another, such as the first stage of a pipeline
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = [host_group(ranks, timeout=600) for ranks in (None, pairs[rank // 2], None)]
    told = [[None] * dist.get_world_size(group) for group in groups]
    for values, group in zip(told, groups, strict=True):
        dist.all_gather_object(values, (rank, os.getpid()), group=group)
    backends = {dist.get_backend(group) for group in groups}
    is_same = groups[0] is groups[2] is not groups[1] and host_group(groups[1], timeout=600) is groups[1]
    return [[each for each, _ in values] for values in told], backends, is_same


def test_hosts_have_groups_of_their_own():
    results = on_ranks(4, hosts_of)
    everyone = [0, 1, 2, 3]
    assert [told for told, _, _ in results] == [[everyone, pair, everyone] for pair in ([0, 1],) * 2 + ([2, 3],) * 2]
    assert all(backends == {"gloo"} and is_same for _, backends, is_same in results)
