"""The environment variables of reward workers, and arguments that are taken from them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

BASICS = (
    *("HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "SHELL", "TZ", "USER"),
    *("TEMP", "TMP", "TMPDIR", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"),
    *("CONDA_PREFIX", "DYLD_LIBRARY_PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    *("REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE"),
    *("CUDA_HOME", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"),
)
"""Variables without which programs do not find their files, libraries and language; none of them holds a secret."""

BASIC_PREFIXES = ("LC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON")
"""Beginnings of the names of further ones."""

_REFERENCE = re.compile(r"\$\{(\w+)\}")


def worker_environment(environment: Mapping[str, str], allowed: Collection[str] | None) -> dict[str, str]:
    """Selects the environment variables that a worker gets.

    Args:
        environment: Variables of the process that starts the worker.
        allowed: Names of the variables that it gets beside the basic ones; None gives it all.
    """
    if allowed is None:
        return dict(environment)
    names = {*BASICS, *allowed}
    return {name: value for name, value in environment.items() if name in names or name.startswith(BASIC_PREFIXES)}


def resolve_references(arguments: Any, environment: Mapping[str, str]) -> Any:
    """Puts the values of environment variables in the place of texts ``${NAME}``, in lists and mappings too.

    Raises:
        ValueError: If a variable is not there.
    """
    if isinstance(arguments, Mapping):
        return {name: resolve_references(value, environment) for name, value in arguments.items()}
    if isinstance(arguments, list):
        return [resolve_references(value, environment) for value in arguments]
    match = _REFERENCE.fullmatch(arguments) if isinstance(arguments, str) else None
    if match is None:
        return arguments
    if match[1] not in environment:
        raise ValueError(
            f"`model.reward.arguments` refers to `{match[0]}`, but the reward's workers have no environment variable"
            " of this name. Set it where the run starts (with `model.reward.backend: ray`, where Ray does), and name"
            " it in `model.reward.environment` if that is set."
        )
    return environment[match[1]]
