"""Classes share no private name with bases of other packages, and files of `compat` are about one package each."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
import textwrap
from collections.abc import Iterator

import verl_lightning
from tests.test_imports import PACKAGE, ROOT, defined, imported, is_private

OTHERS = {f"verl_lightning.cli.evaluation.{name}_model" for name in ("inspect", "lm_eval")}
"""Modules that can't be imported here: the packages that they adapt are installed by users alone."""


def own_names(cls: type) -> set[str]:
    """Private names that the source of a class defines; none of a class that has no source."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return set()
    return {name for name in defined(ast.parse(source)) if is_private(name)}


def classes() -> Iterator[type]:
    """The package's classes outside of `compat`."""
    for found in pkgutil.walk_packages(verl_lightning.__path__, "verl_lightning."):
        if found.name in OTHERS:
            continue
        module = importlib.import_module(found.name)
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__ and ".compat." not in module.__name__:
                yield value


def is_theirs(base: type) -> bool:
    """Whether a class is one of another package's, written in Python."""
    return base.__module__.split(".")[0] not in {"verl_lightning", "builtins", "typing", "abc", "enum", "collections"}


def test_no_class_takes_a_private_name_of_a_base_of_another_package():
    """Neither on purpose nor by chance: its base would call or overwrite it."""
    theirs: dict[type, set[str]] = {}
    for cls in classes():
        for base in filter(is_theirs, cls.__mro__[1:]):
            if base not in theirs:
                theirs[base] = own_names(base)
            assert not own_names(cls) & theirs[base], (cls, base)


def test_files_of_compat_are_about_one_package_each():
    """They import no other file of the package but what patches, and their package where it is used."""
    for file in (PACKAGE / "compat").glob("*.py"):
        tree = ast.parse(file.read_text())
        names = {name for name in imported(tree) if name.startswith("verl_lightning")}
        assert names <= {"verl_lightning.compat.patching"}, file
        top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        others = {name.partition(".")[0] for name in imported(top)} - set(sys.stdlib_module_names)
        subject = {"lightning"} if file.stem.startswith("lightning") else set()
        assert others <= {"__future__", "torch", "typing_extensions", "verl_lightning"} | subject, file
        assert (ROOT / "tests" / "compat" / f"test_{file.stem}.py").exists() or file.stem in {"__init__", "patching"}
