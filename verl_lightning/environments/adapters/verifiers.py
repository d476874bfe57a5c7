"""Environments of the package `verifiers`, which ask the policy by OpenAI's API and judge what it says: an agent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

MODEL = "policy"
"""Name by which the policy is asked; the server takes any."""


async def play(client: Any, row: Mapping[str, Any]) -> float:
    """Play one rollout of the environment that a row names, and return its reward.

    Args:
        client: OpenAI client of the policy.
        row: Row with a column ``verifiers``, an object with ``env_id`` and ``env_args``, and the ``index`` of a row in
            that environment's own data. The row's prompt is not used.
    """
    settings = row["verifiers"]
    environment = _environment(settings["env_id"], json.dumps(settings.get("env_args") or {}))
    data = environment.get_dataset()
    asked = data[int(row["index"]) % len(data)]
    output = await environment.run_rollout(asked, client, MODEL, {})
    return float(output["reward"])


@cache
def _environment(env_id: str, arguments: str) -> Any:
    """Returns an environment; made once in each process of agents."""
    import verifiers

    return verifiers.load_environment(env_id, **json.loads(arguments))
