"""Lightning's own tests of its strategies, with ours in the place of its `DDPStrategy`.

``make test-lightning LIGHTNING=FOLDER`` runs them from a checkout of Lightning, of the version that is installed. It is
no part of `make test`: the tests are not ours to ship.
"""

from __future__ import annotations

import os
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

FILES = (
    "strategies/test_common.py",
    "strategies/test_custom_strategy.py",
    "strategies/test_ddp.py",
    "strategies/test_registry.py",
    "strategies/test_single_device.py",
    "trainer/connectors/test_accelerator_connector.py",
)
"""Files below ``tests/tests_pytorch`` that are about strategies and start no processes; `conformance.py` does that."""

BUCKETS = "ours always says how large its buckets are, which is an option of the run"
START = "`ddp_spawn`, `ddp_fork` and `ddp_notebook` stay Lightning's own; our modules are refused under them"
CONFIGURATION = "ours takes what a configuration can say; devices and accelerator are the trainer's options"
SHARDS = "`fsdp` is ours, by FSDP2, which runs on CPUs too"

DIFFERENCES = {
    "test_ddp_kwargs_from_registry[[]ddp-*": BUCKETS,
    "test_ddp_kwargs_from_registry[[]ddp_find_*": BUCKETS,
    "test_ddp_find_unused_parameters_strategy_registry[[]ddp_find_*": BUCKETS,
    "test_ddp_find_unused_parameters_strategy_registry[[]ddp_[sfn][!i]*": START,
    "test_accelerator_choice_multi_node_gpu[[]?-ddp_spawn-*": START,
    "test_strategy_choice_cpu_str[[]ddp_spawn*": START,
    "test_strategy_choice_gpu_str[[]ddp_spawn*": START,
    "test_strategy_choice_ddp_cuda[[]ddp_spawn-*": START,
    "test_strategy_choice_ddp_spawn_cpu": START,
    "test_strategy_choice_ddp_fork_*": START,
    "test_custom_accelerator": CONFIGURATION,
    "test_parallel_devices_in_strategy_confilict_with_accelerator*": CONFIGURATION,
    "test_fsdp_strategy_registry": SHARDS,
    "test_check_fsdp_strategy_and_fallback": SHARDS,
}
"""Reason of each deliberate difference, by a pattern of the test's name."""

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which a run of one machine keeps to its loopback interface; Lightning's tests allow none to be set."""


def pytest_configure(config: pytest.Config) -> None:
    """Puts our strategy where Lightning's tests import theirs from."""
    from lightning.pytorch import strategies

    from verl_lightning.strategies import DDPStrategy

    strategies.DDPStrategy = DDPStrategy  # type: ignore[misc]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Has tests of deliberate differences fail, and says so where one no longer does."""
    for item in items:
        for pattern, reason in DIFFERENCES.items():
            if fnmatchcase(item.nodeid.rpartition("::")[2], pattern):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Takes back what our `ddp` sets on purpose, before Lightning's tests look."""
    for name in INTERFACES:
        os.environ.pop(name, None)


def main(folder: Path) -> int:
    """Runs the tests of a checkout.

    Args:
        folder: Checkout of Lightning.
    """
    tests = folder / "tests"
    missing = [name for name in FILES if not (tests / "tests_pytorch" / name).is_file()]
    if missing:
        sys.exit(f"`{tests / 'tests_pytorch' / missing[0]}` does not exist. Give a checkout of Lightning.")
    sys.path.insert(0, str(tests))
    options = ["-p", "tests.lightning_suite", "-c", os.devnull, "--rootdir", str(tests), "-q", "-rfExX", *sys.argv[2:]]
    return pytest.main([*options, *(str(tests / "tests_pytorch" / name) for name in FILES)])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("Say where the checkout is: `make test-lightning LIGHTNING=FOLDER`.")
    sys.exit(main(Path(sys.argv[1]).absolute()))
