"""Finds a reward function by its name."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_lightning.faults import closest
from verl_lightning.rewards.given import from_wire
from verl_lightning.rewards.signatures import BoundReward

OF_ENVIRONMENTS = "environment"
"""Name of the reward function that leaves rewards to the environments of `rollout.environment`."""

BUILT_IN_REWARDS = {
    "boxed_format": "verl_lightning.rewards.response_format.boxed_format",
    OF_ENVIRONMENTS: "verl_lightning.rewards.of_environments.environment",
    "exact_match": "verl_lightning.rewards.exact_match.exact_match",
    "gsm8k": "verl_lightning.rewards.gsm8k.gsm8k",
    "gsm8k_flexible": "verl_lightning.rewards.gsm8k.gsm8k_flexible",
    "math": "verl_lightning.rewards.math_answer.math_answer",
    "tag_format": "verl_lightning.rewards.response_format.tag_format",
}
"""Import path of each reward function that has a short name."""


def load_reward_function(name: str | dict[str, str], arguments: Mapping[str, Any]) -> BoundReward:
    """Imports a reward function and binds its keyword arguments.

    Args:
        name: A key of ``BUILT_IN_REWARDS``, an import path ``package.module.function``, or a file
            ``path/to/file.py:function``; or what `to_wire` makes of a function that was given in Python.
        arguments: Keyword arguments, bound for every call.

    Raises:
        ValueError: If the function does not import, is no function, or can't be called with these arguments.
    """
    if isinstance(name, dict):
        name, function = from_wire(name)
    else:
        check_exists(name)
        function = _find(BUILT_IN_REWARDS.get(name, name))
    if not callable(function) or inspect.isclass(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"The reward `function: {name}` must be a function, plain or `async`, got {function!r}.")
    return BoundReward(name, function, arguments)


def check_exists(name: str) -> None:
    """Refuses a name behind which there can be no function, without importing anything.

    Args:
        name: Name as for `load_reward_function`.

    Raises:
        ValueError: If it is no built-in name, or its file or package is not there.
    """
    package, reason = name.partition(".")[0], ""
    if ".py:" in name:
        file = Path(name.rpartition(":")[0]).expanduser()
        reason = "" if file.is_file() else f"FileNotFoundError: no file `{file}`"
    elif name.endswith(".py"):
        raise ValueError(f"The reward `function: {name}` is a file: say which function of it, as `{name}:FUNCTION`.")
    elif "." not in name and name not in BUILT_IN_REWARDS:
        raise ValueError(f"The reward `function: {name}` is unknown.{closest(name, BUILT_IN_REWARDS)} {_ways_out()}")
    elif "." in name and package.isidentifier() and importlib.util.find_spec(package) is None:
        reason = f"ModuleNotFoundError: No module named '{package}'"
    if reason:
        raise ValueError(f"The reward `function: {name}` does not import: {reason}. {_ways_out()}")


def _find(name: str) -> Any:
    return find_object(name, f"The reward `function: {name}`", _ways_out())


def find_object(name: str, label: str, ways_out: str) -> Any:
    """Imports what a name stands for.

    Args:
        name: Import path ``package.module.object``, or a file ``path/to/file.py:object``.
        label: Option and name, as a message begins with them.
        ways_out: Sentence that says what could be given.

    Raises:
        ValueError: If it does not import.
    """
    if ".py:" in name:
        file, _, attribute = name.rpartition(":")
        load = functools.partial(_import_file, Path(file).expanduser())
    else:
        path, _, attribute = name.rpartition(".")
        load = functools.partial(importlib.import_module, path)
    try:
        module = load()
    except BaseException as error:  # a user's module may raise anything, `sys.exit` included
        raise ValueError(f"{label} does not import: {type(error).__name__}: {error}. {ways_out}") from error
    if not hasattr(module, attribute):
        raise ValueError(f"{_no_attribute(label, module.__file__, attribute, dir(module))} {ways_out}")
    return getattr(module, attribute)


def no_function(name: str, names: Collection[str]) -> str:
    """Says that a file has no function of a name, but others.

    Args:
        name: File and function, ``path/to/file.py:function``.
        names: Names that the file has.
    """
    file, _, attribute = name.rpartition(":")
    return f"{_no_attribute(f'The reward `function: {name}`', file, attribute, names)} {_ways_out()}"


def _no_attribute(label: str, file: object, attribute: str, names: Collection[str]) -> str:
    """Says that a file has no object of a name, and which may have been meant."""
    return f"{label} does not import: `{file}` has no `{attribute}`.{closest(attribute, names)}"


def _import_file(file: Path) -> ModuleType:
    name = f"reward_file_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.append(str(file.resolve().parent))  # so that it can import its neighbours, as a script can
    spec.loader.exec_module(module)
    return module


def _ways_out() -> str:
    return (
        f"Give a built-in name ({', '.join(BUILT_IN_REWARDS)}), an import path such as `package.module.function`"
        f" that Python finds from `{Path.cwd()}`, or a file such as `path/to/file.py:function`."
    )
