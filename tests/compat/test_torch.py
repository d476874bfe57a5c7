"""Private names of torch that `compat.torch` uses are where it looks for them."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, filesystem, save
from torch.testing import assert_close

from verl_lightning.compat import torch as compat

STATE = {"weights": {"a": torch.arange(6.0), "steps": [1, 2]}}


def test_a_process_alone_reads_what_is_named_or_all(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is alone
        save(STATE, storage_writer=FileSystemWriter(tmp_path))
    some, everything = {"weights": {"a": torch.zeros(6)}}, {}
    compat.load_alone(FileSystemReader(tmp_path), some)
    compat.load_alone(FileSystemReader(tmp_path), everything)
    assert_close(some["weights"]["a"], STATE["weights"]["a"])
    assert_close(everything, STATE)


def test_the_writer_of_items_is_called_through_ours(tmp_path):
    own, called = filesystem._write_item, []

    def write(write_item, *args, **kwargs):
        called.append(write_item is own)
        return write_item(*args, **kwargs)

    with warnings.catch_warnings(), compat.item_writer_replaced(filesystem, write):
        warnings.simplefilter("ignore")
        assert inspect.signature(filesystem._write_item) == inspect.signature(own)
        save(STATE, storage_writer=FileSystemWriter(tmp_path))
    assert called
    assert all(called)
    assert filesystem._write_item is own
    info = compat.storage_info("a.distcp", 1, 2)
    assert (type(info).__name__, info.relative_path, info.offset, info.length) == ("_StorageInfo", "a.distcp", 1, 2)


def test_a_destroyed_group_is_known(tmp_path):
    dist.init_process_group("gloo", init_method=Path(tmp_path, "store").as_uri(), rank=0, world_size=1)
    group = dist.new_group()
    assert compat.is_running(group)
    dist.destroy_process_group(group)
    assert not compat.is_running(group)
    dist.destroy_process_group()


def test_the_memorys_history_and_the_compilers_marks_have_their_names():
    """What they do is seen on GPUs alone."""
    assert {"enabled", "stacks", "max_entries"} <= inspect.signature(
        torch.cuda.memory._record_memory_history
    ).parameters.keys()
    assert "filename" in inspect.signature(torch.cuda.memory._dump_snapshot).parameters
    assert list(inspect.signature(torch._dynamo.mark_static).parameters)[:2] == ["t", "index"]


def test_a_view_of_an_array_that_is_not_written_to_is_made_in_silence():
    array = np.arange(3)
    array.flags.writeable = False
    assert_close(compat.view_of_read_only(array), torch.arange(3))


def test_a_schedule_is_moved_and_keeps_its_rates():
    weight = torch.nn.Parameter(torch.ones(1))
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([weight], lr=lr), lambda step: step) for lr in (1, 2)
    ]
    schedules[0].last_epoch = 5
    compat.move_schedule(schedules[1], schedules[0].state_dict(), [10.0])
    assert (schedules[1].last_epoch, schedules[1].base_lrs, schedules[1].get_last_lr()) == (5, [2], [10.0])
    assert {"_step_count", "_last_lr"} <= schedules[0].state_dict().keys()
    assert "Detected call of `lr_scheduler.step" in inspect.getsource(torch.optim.lr_scheduler)
