"""Imports point one way, and heavy packages are imported by those who use them only."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "verl_lightning"
# Files that any room above `functional` may use.
FACTS = {"deprecation", "faults", "needs", "types", "metrics", "ranges", "run_folders", "seeding", "supervisor"}
CLI = {
    *("launch", "cli", "cli_errors", "cli_parser", "doctor", "lightning_cli", "loggers", "export", "migrate", "saying"),
    *("preflight", "strict_yaml"),
}
BASE = {"functional", "compat"} | FACTS
ALLOWED = {
    "compat": set(),
    "functional": {"compat"},
    "algorithms": BASE,
    "deprecation": set(),
    "faults": set(),
    "needs": set(),
    "types": set(),
    "metrics": {"faults"},
    "ranges": set(),
    "run_folders": {"compat"},
    "seeding": set(),
    "supervisor": set(),
    "data": BASE,
    "models": BASE,
    "ray": BASE,
    "rewards": BASE | {"ray"},
    "rollout": BASE | {"models", "ray"},
    "strategies": BASE | {"models"},
    "modules": BASE | {"algorithms", "models", "rewards", "rollout", "strategies"},
    "callbacks": BASE | {"algorithms", "models", "ray", "rewards", "rollout", "strategies", "modules"},
    **{
        name: BASE
        | {"algorithms", "data", "models", "rewards", "rollout", "strategies", "modules", "callbacks", "ray"}
        | CLI
        for name in CLI
    },
}
HEAVY = {"vllm", "megatron", "ray", "wandb", "peft", "flash_attn", "liger_kernel", "mbridge"}


def modules_of(room: str) -> list[Path]:
    """The files of a room; those of the linked folders too."""
    single = PACKAGE / f"{room}.py"
    return [single] if single.exists() else sorted((PACKAGE / room).resolve().rglob("*.py"))


def imported(tree: ast.Module) -> Iterator[str]:
    """Full names of the imported modules, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            yield node.module or ""


def rooms() -> set[str]:
    """Every file and folder of the package with Python in it."""
    return {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}


def test_the_table_knows_every_room():
    assert rooms() - {"__init__", "configs"} == ALLOWED.keys()


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_from_those_below_it_only(room):
    for file in modules_of(room):
        names = [name.split(".") for name in imported(ast.parse(file.read_text()))]
        used = {parts[1] for parts in names if parts[0] == "verl_lightning" and len(parts) > 1}
        assert used <= ALLOWED[room] | {room}, file


def test_the_maths_imports_torch_alone():
    for file in modules_of("functional"):
        roots = {name.split(".")[0] for name in imported(ast.parse(file.read_text()))}
        others = roots - set(sys.stdlib_module_names) - {"torch", "jaxtyping", "verl_lightning", "__future__"}
        assert not others, file


def test_modules_know_no_strategy_by_name():
    """They may use what strategies offer to all; never one of them."""
    for file in modules_of("modules"):
        names = {name for name in imported(ast.parse(file.read_text())) if "strategies." in name}
        assert not {name for name in names if name.split(".")[2] in {"ddp", "fsdp", "megatron"}}, file


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_optional_packages_are_imported_where_they_are_used(room):
    for file in modules_of(room):
        top_level = ast.Module(
            body=[node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)],
            type_ignores=[],
        )
        assert not {name.split(".")[0] for name in imported(top_level)} & HEAVY, file


@pytest.mark.parametrize("module", ["verl_lightning", "verl_lightning.rewards", "verl_lightning.cli"])
def test_light_modules_import_no_torch(module):
    """Reward workers and `verl-fit` must start at once."""
    code = (
        f"import sys, {module}; sys.exit(any(name in sys.modules for name in ('torch', 'lightning', 'transformers')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_reading_a_configuration_loads_no_optional_package():
    """Whoever does not use Weights & Biases, Ray or vLLM does not wait for them."""
    code = (
        "import sys; from verl_lightning.cli import main\n"
        f"try: main(['--config', 'grpo', '--print_config'])\nfinally: print(sorted({HEAVY} & sys.modules.keys()))"
    )

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert "class_path: verl_lightning.modules" in shown
    assert shown.endswith("\n[]\n")
