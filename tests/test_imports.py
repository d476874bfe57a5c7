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
FACTS = {
    "episodes",
    "faults",
    "needs",
    "pictures",
    "processes",
    "types",
    "metrics",
    "options",
    "ranges",
    "run_folders",
    "run_records",
    "seeding",
    "trainer_numbers",
}
CLI = {"cli", "launch", "loggers", "migrate", "phases", "submit"}
BASE = {"functional", "compat"} | FACTS
ALLOWED = {
    "compat": set(),
    "functional": {"compat"},
    "algorithms": BASE,
    "episodes": set(),
    "faults": set(),
    "needs": set(),
    "types": {"episodes"},
    "metrics": {"faults"},
    "options": {"faults"},
    "pictures": {"types"},
    "ranges": set(),
    "run_folders": {"compat", "run_records"},
    "run_records": {"processes"},
    "seeding": set(),
    "trainer_numbers": set(),
    "processes": {"faults"},
    "data": BASE,
    "models": BASE,
    "ray": BASE,
    "rewards": BASE | {"ray"},
    "rollout": BASE | {"models", "ray"},
    "environments": BASE | {"data", "models", "rewards", "rollout"},
    "strategies": BASE | {"models"},
    "telemetry": BASE | {"models", "strategies"},
    "modules": BASE | {"algorithms", "data", "environments", "models", "rewards", "rollout", "strategies", "telemetry"},
    "callbacks": BASE
    | {"algorithms", "environments", "models", "modules", "ray", "rewards", "rollout", "strategies", "telemetry"},
}
BELOW_CLI = BASE | ALLOWED.keys()
ALLOWED |= dict.fromkeys(CLI, BELOW_CLI | CLI)
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


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("verl_lightning.rewards.worker", {"asyncio"}),
        ("verl_lightning.rollout.dispatcher", {"lightning", "transformers"}),
    ],
)
def test_a_process_beside_the_trainer_imports_no_more_than_it_needs(module, heavy):
    """A run starts many; `asyncio` is as much as all else in a reward worker, and ``async`` functions alone need it."""
    code = f"import sys, {module}; sys.exit(bool({heavy} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_reading_a_configuration_loads_no_optional_package():
    """Whoever does not use Weights & Biases, Ray or vLLM does not wait for them."""
    code = (
        "import sys; from verl_lightning.cli import main\n"
        f"try: main(['--config', 'grpo', '--print_config'])\nfinally: print(sorted({HEAVY} & sys.modules.keys()))"
    )

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert "class_path: verl_lightning.PPOModule" in shown
    assert shown.endswith("\n[]\n")


DOCUMENTED = {"_exit", "_replace", "_thread"}
"""Names that Python's own documentation has: of `os`, of named tuples, and of a module."""

FILTERS = {"filterwarnings", "simplefilter", "catch_warnings", "addFilter", "disable"}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "attrgetter"}
FOLDERS = (PACKAGE, ROOT / "strategies", ROOT / "callbacks")
FILES = sorted(file for folder in FOLDERS for file in folder.rglob("*.py") if PACKAGE / "compat" not in file.parents)
TREES = {file: ast.parse(file.read_text()) for file in FILES}


def is_private(name: object) -> bool:
    return (
        isinstance(name, str)
        and name.startswith("_")
        and name != "_"
        and not name.startswith("__")
        and name.isidentifier()
    )


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that a file or class gives to functions, classes, variables and attributes of its own objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


def is_own(value: ast.expr) -> bool:
    """Whether an expression is the object or class at work."""
    return ast.unparse(value) in ("self", "cls", "super()", "type(self)")


OURS = {name for tree in TREES.values() for name in defined(tree)}


def uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of what belongs into `compat`."""
    in_file, modules = set(defined(tree)), {name for name in module_names(tree) if name != "sys"}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if is_private(name) and name not in DOCUMENTED:
                if name not in (OURS if is_own(value) else in_file):
                    yield node.lineno, ast.unparse(node)
            case ast.Call(func=ast.Name(id=function), args=[_, ast.Constant(value=name), *_]) if function in BY_NAME:
                if is_private(name) and name not in in_file:
                    yield node.lineno, ast.unparse(node)
            case ast.Call(func=ast.Attribute(attr=name)) if name in FILTERS:
                yield node.lineno, ast.unparse(node)
            case ast.Attribute(value=ast.Name(id=module), ctx=ast.Store() | ast.Del()) if module in modules:
                yield node.lineno, ast.unparse(node)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                path = [*(getattr(node, "module", None) or "").split("."), *(alias.name for alias in names)]
                if any(is_private(part) and part not in DOCUMENTED for name in path for part in name.split(".")):
                    yield node.lineno, ast.unparse(node)


def module_names(tree: ast.Module) -> Iterator[str]:
    """What `import` binds in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)


def test_no_room_uses_private_names_of_other_packages():
    """Nor does any filter their warnings, or patch them: that belongs into `verl_lightning/compat`."""
    assert {file: found for file, tree in TREES.items() if (found := list(uses(tree)))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "trainer._results",
        "self._trainer_of_lightning",
        "from torch.nn import _reduction",
        "from torch._utils import annotate",
        "import torch._dynamo.config",
        "getattr(backbone, '_is_stateful', False)",
        "warnings.filterwarnings('ignore')",
        "import torch\ntorch.set_num_threads = print",
    ],
)
def test_each_kind_of_private_use_is_found_in_a_room(line):
    assert len(list(uses(ast.parse(line)))) == 1
