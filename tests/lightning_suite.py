"""Lightning's own tests of its strategies, with ours in the place of its `DDPStrategy`.

``make test-lightning LIGHTNING=FOLDER`` runs them from a checkout of Lightning, of the version that is installed. It is
no part of `make test`: the tests are not ours to ship.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

FILES = (
    "strategies/test_common.py",
    "strategies/test_custom_strategy.py",
    "strategies/test_ddp.py",
    "strategies/test_ddp_integration.py",
    "strategies/test_registry.py",
    "strategies/test_single_device.py",
    "trainer/connectors/test_accelerator_connector.py",
)
"""Files below ``tests/tests_pytorch`` that are about strategies which train on a CPU."""

DIFFERENCES: dict[str, str] = {}
"""Reason of each deliberate difference, by the name of the test or its beginning up to the parameters."""


def pytest_configure(config: pytest.Config) -> None:
    """Puts our strategy where Lightning's tests import theirs from."""
    from lightning.pytorch import strategies

    from verl_lightning.strategies import DDPStrategy

    strategies.DDPStrategy = DDPStrategy  # type: ignore[misc]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Has tests of deliberate differences fail, and says so where one no longer does."""
    for item in items:
        name = item.nodeid.rpartition("::")[2]
        if reason := DIFFERENCES.get(name, DIFFERENCES.get(name.partition("[")[0])):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


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
    os.environ.setdefault("PL_RUN_STANDALONE_TESTS", "0")
    options = ["-p", "tests.lightning_suite", "-c", os.devnull, "--rootdir", str(tests), "-q", "-rfExX", *sys.argv[2:]]
    return pytest.main([*options, *(str(tests / "tests_pytorch" / name) for name in FILES)])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
