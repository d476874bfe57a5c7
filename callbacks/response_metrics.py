"""Measures validation responses by metrics of torchmetrics, over all prompts and for each data source."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from torchmetrics import Metric
from typing_extensions import override

from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.judge import ground_truth
from verl_lightning.modules.sampling import SamplingModule
from verl_lightning.types import PromptBatch

EVERYWHERE = ""
"""Data source that stands for all of them."""


class ResponseMetrics(Callback):
    """Logs ``val/<metric>`` and ``val/<data source>/<metric>``, which `EarlyStopping` and the like may monitor.

    Each metric is updated with the texts of responses and of the ground truths of their prompts, as those of
    ``torchmetrics.text`` are; with ``of: rewards`` with the rewards of responses alone, as ``MeanMetric`` is.

    Args:
        metrics: Metrics by name.
        of: Values that the metrics measure: ``texts`` or ``rewards``.

    Raises:
        ValueError: If there are none, or ``of`` is another word.
        MisconfigurationException: In ``setup``, if the module has no responses.
    """

    def __init__(self, metrics: dict[str, Metric], of: str = "texts") -> None:
        if not metrics:
            raise ValueError("`metrics` names no metric. Give one, such as `{cer: torchmetrics.text.CharErrorRate}`.")
        if of not in ("texts", "rewards"):
            raise ValueError(f"`of` must be `texts` or `rewards`, got `{of}`.")
        self.metrics = metrics
        self.of = of
        self._found: dict[str, dict[str, Metric]] = {}  # by data source

    @property
    def logged(self) -> Collection[str]:
        """Last parts of the names of what is logged."""
        return self.metrics.keys()

    @property
    @override
    def state_key(self) -> str:
        return f"{type(self).__qualname__}{sorted(self.metrics)}"

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(pl_module, SamplingModule):
            raise MisconfigurationException(
                f"`ResponseMetrics` measures responses, but `{type(pl_module).__name__}` samples none. Train a"
                " `PPOModule`, or take the callback out."
            )

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._found = {}

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        assert batch.rollout is not None
        result, values = outputs["reward_result"], dict[str, list[tuple[Any, ...]]]()
        prompts, known = batch.rollout.prompt_index.tolist(), result.known_rewards
        is_duplicate = batch.is_duplicate.tolist()
        for prompt, response, reward in zip(prompts, result.responses, known, strict=True):
            row = batch.rows[prompt]
            value = (reward,) if self.of == "rewards" else (response, _ground_truth(row))
            if not is_duplicate[prompt] and None not in value:
                for source in (EVERYWHERE, str(row["data_source"])):
                    values.setdefault(source, []).append(value)
        for source, own in values.items():
            for metric in self._of(source, pl_module).values():
                metric.update(*map(list, zip(*own, strict=True)))

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = cast(PostTrainingModule, pl_module)
        everyone = module.contract.gather_over_data_parallel(sorted(self._found))
        for source in sorted({source for rank in everyone for source in rank}):
            prefix = f"val/{source}" if source else "val"
            for name, metric in self._of(source, pl_module).items():
                module.log(f"{prefix}/{name}", metric.compute(), batch_size=1)

    def _of(self, source: str, module: LightningModule) -> Mapping[str, Metric]:
        """The metrics of a data source, made when it is first seen."""
        if source not in self._found:
            self._found[source] = {name: metric.clone().to(module.device) for name, metric in self.metrics.items()}
        return self._found[source]


def _ground_truth(row: Mapping[str, Any]) -> str | None:
    truth = ground_truth(row)
    return None if truth is None else str(truth)
