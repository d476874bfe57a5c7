"""Processes stay near their GPU: read from a made-up tree of devices, and tried on this machine."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from verl_lightning.callbacks import NumaAffinity, numa
from verl_lightning.callbacks.numa import node_of, numa_nodes, parse_cores, set_affinity


@pytest.fixture
def machine(tmp_path):
    """Two nodes; the first has this process's cores, and the GPU at 3b hangs on it."""
    mine = sorted(os.sched_getaffinity(0))
    for node, cores in enumerate([str(mine[0]), "900-902,904", ""]):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    for address, node in {"0000:3b:00.0": 0, "0000:af:00.0": 1, "0000:d8:00.0": -1}.items():
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_lists_of_cores_are_read():
    assert parse_cores("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cores("\n") == set()


def test_the_tree_tells_nodes_and_places(machine):
    assert numa_nodes(machine)[1] == {900, 901, 902, 904}
    assert numa_nodes(machine).keys() == {0, 1}
    assert [node_of(f"0000:{bus}:00.0", machine) for bus in ("3b", "af", "d8", "00")] == [0, 1, -1, -1]


def test_a_process_is_pinned_with_its_threads_and_let_go(machine, monkeypatch, caplog):
    monkeypatch.setattr(numa, "SYSFS", machine)
    before = os.sched_getaffinity(0)
    done, seen = threading.Event(), []
    thread = threading.Thread(target=lambda: (done.wait(10), seen.append(os.sched_getaffinity(0))))
    thread.start()
    callback = NumaAffinity()
    with caplog.at_level(logging.INFO, logger=numa.log.name):
        callback._pin("0000:3b:00.0", local_rank=0)
    done.set()
    thread.join()

    assert seen == [os.sched_getaffinity(0)] == [{min(before)}]
    assert "local rank 0 runs on the 1 cores of NUMA node 0" in caplog.text
    callback.teardown(None, None, "fit")
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("address", ["0000:af:00.0", "0000:d8:00.0"])
def test_without_a_core_on_the_node_nothing_changes(machine, monkeypatch, address):
    monkeypatch.setattr(numa, "SYSFS", machine)
    before = os.sched_getaffinity(0)

    NumaAffinity()._pin(address, local_rank=0)

    assert os.sched_getaffinity(0) == before


def test_on_this_machine_training_goes_on(fit, caplog):
    before = os.sched_getaffinity(0)

    with caplog.at_level(logging.INFO):
        fit(NumaAffinity(), max_steps=1)

    assert "`NumaAffinity` does nothing" in caplog.text
    assert os.sched_getaffinity(0) == before


def test_affinity_of_all_threads_can_be_set_back():
    before = os.sched_getaffinity(0)
    set_affinity({min(before)})
    assert os.sched_getaffinity(0) == {min(before)}
    set_affinity(before)
    assert os.sched_getaffinity(0) == before
