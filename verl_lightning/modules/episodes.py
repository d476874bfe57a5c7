"""Metrics of episodes, by environment."""

from __future__ import annotations

from verl_lightning.metrics import Metric, MetricTable, mean, total
from verl_lightning.types import Rollout


def episode_metrics(rollout: Rollout) -> dict[str, Metric]:
    """Counts and means of a rollout's episodes under ``env/<environment>/``; empty without environments.

    Args:
        rollout: Rollout of the episodes.
    """
    if rollout.episodes is None:  # the lengths below wait for the device
        return {}
    table = MetricTable()
    own = rollout.response_mask.sum(-1).tolist()
    read = rollout.attention_mask[:, -rollout.response_mask.shape[1] :].sum(-1).tolist()
    for episode, num_own, num_all in zip(rollout.episodes or (), own, read, strict=False):
        prefix = f"env/{episode.environment}"
        failed = bool(episode.error)
        num_own += sum(sum(each.is_own) for each in episode.past)
        num_all += sum(len(each.token_ids) for each in episode.past)
        table.add(
            {
                f"{prefix}/episodes": total(1.0),
                f"{prefix}/errors": total(float(failed and not episode.is_timeout)),
                f"{prefix}/timeouts": total(float(episode.is_timeout)),
                f"{prefix}/reward": mean(0.0 if failed else episode.reward, float(not failed)),
                f"{prefix}/turns": mean(float(episode.num_turns)),
                f"{prefix}/trajectories": mean(float(1 + len(episode.past))),
                f"timing_s/{prefix}": mean(sum(episode.seconds)),
                f"{prefix}/tokens/own": mean(float(num_own)),
                f"{prefix}/tokens/read": mean(float(num_all - num_own)),
            }
        )
        if not failed:
            table.add({f"{prefix}/{name}": mean(value) for name, value in episode.metrics.items()})
    return dict(table.merged)
