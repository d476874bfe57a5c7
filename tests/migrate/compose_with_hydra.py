"""Composes configurations with Hydra: a program that reads JSON and writes JSON."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


def composed(folder: str, name: str, overrides: list[str]) -> Any:
    """Returns the values of a configuration, or Hydra's refusal."""
    try:
        with initialize_config_dir(folder, version_base=None):
            return resolved(compose(name, overrides=overrides))
    except (HydraException, OmegaConfBaseException) as error:
        return f"{type(error).__name__}: {error}"


def resolved(node: Any) -> Any:
    """Returns a node's values, with the text of references that lead nowhere."""
    if isinstance(node, DictConfig):
        return {str(key): value_at(node, key) for key in node}
    if isinstance(node, ListConfig):
        return [value_at(node, index) for index in range(len(node))]
    return node


def value_at(node: Any, key: Any) -> Any:
    """Returns one value of a node."""
    try:
        return resolved(node[key])
    except OmegaConfBaseException:
        return OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index, call-overload]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    json.dump([composed(*job) for job in json.load(sys.stdin)], sys.stdout)
