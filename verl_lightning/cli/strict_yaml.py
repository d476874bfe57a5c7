"""YAML files in which no key may stand twice."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml  # type: ignore[import-untyped]
from typing_extensions import override


class StrictLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads YAML and refuses a key that stands twice in one mapping, of which the first would silently be lost."""

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise DuplicateKeyError(f"line {key_node.start_mark.line + 1} sets `{key_node.value}` a second time.")
            seen.add(key_node.value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


class DuplicateKeyError(ValueError):
    """A mapping of a YAML file has a key twice."""
