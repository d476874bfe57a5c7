"""Settings of rewards: one function or several with weights, and the limits in which they run."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_lightning.options import Options
from verl_lightning.rewards.given import given_function

_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_MAX_CONCURRENCY = 256


@dataclass(frozen=True, kw_only=True)
class WeightedReward(Options):
    """One of several reward functions, and the weight of its reward in their sum."""

    function: str
    """Name or place of the function, as for one that judges alone."""

    weight: float = 1.0
    """Factor of its reward in the sum; 0 only logs it."""

    name: str | None = None
    """Name of its reward in the metrics, ``reward/<name>``; null takes the function's own."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function, the same for every sample."""

    def take_types(self) -> None:
        """Checks the types of all fields; a function that was given in Python becomes its name and itself."""
        if callable(self.function):
            object.__setattr__(self, "function", given_function(self.function))
        super().take_types()

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"`weight` must be a finite number, got {self.weight}.")

    @property
    def label(self) -> str:
        """Name of its reward in the metrics."""
        return self.name or re.split(r"[.:]", self.function)[-1]


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(Options, key="model.reward.model"):
    """A reward model on the trainer's devices, spread as the policy is, or on others."""

    path: str
    """Folder or hub name of a sequence classifier with one label and the policy's tokens, such as `RewardModule`
    exports."""

    weight: float = 1.0
    """Factor of its reward in the sum with those of functions and environments."""

    step: str | None = None
    """Text whose tokens end a step of a response, such as a line feed: each step is rewarded where it ends, with the
    value there, and the response's reward is the sum. Null rewards the whole response at its end."""

    micro_batch_size: int = 8
    """Sequences of one forward pass on one rank."""

    offload: bool = False
    """True keeps the model in the host's memory but while it judges; not with strategies that spread models."""

    devices: list[str] = field(default_factory=list)
    """Device of each local rank's own copy, such as ``[cuda:4, cuda:5]`` beside a trainer on four others; empty is that
    of the trainer. Not with strategies that spread models."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the stored weights."""

    def __post_init__(self) -> None:
        if self.offload and self.devices:
            raise ValueError(
                "`model.reward.model.offload` makes room on the trainer's devices, where the model is not with"
                " `model.reward.model.devices`. Leave one of them out."
            )
        if not math.isfinite(self.weight):
            raise ValueError(f"`model.reward.model.weight` must be a finite number, got {self.weight}.")
        if self.micro_batch_size < 1:
            raise ValueError(f"`model.reward.model.micro_batch_size` must be at least 1, got {self.micro_batch_size}.")
        if self.step == "":
            raise ValueError("`model.reward.model.step` is empty: give the text that ends a step, or null.")


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Options, key="model.reward"):
    """Reward functions that judge the responses, and settings for running them."""

    function: str | None = None
    """A built-in name (``gsm8k``, ``gsm8k_flexible``, ``math``, ``exact_match``, ``tag_format``, ``boxed_format``), an
    import path ``package.module.function``, or a file ``path/to/file.py:function``. It may be ``async``."""

    functions: list[WeightedReward] = field(default_factory=list)
    """Several functions in place of the one, such as ``[{function: math, weight: 1.0}, {function: boxed_format, weight:
    0.1}]``. The reward is the weighted sum of theirs, and each is logged by its name."""

    model: RewardModelConfig | None = None
    """A reward model, beside the functions or in their place."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function, the same for every sample. They are saved and logged with the other settings;
    ``${NAME}`` stands for the environment variable ``NAME``, whose value is not."""

    skip_special_tokens: bool = True
    """True to take special tokens such as ``<|im_end|>`` out of the text that the function sees."""

    environment: list[str] | None = None
    """Names of the environment variables that the function may see, beside basic ones such as ``PATH`` and ``HOME``
    (``verl_lightning.rewards.environment.BASICS``); null lets it see all."""

    num_workers: int = 2
    """Workers of each rank: processes, or Ray actors with one CPU each."""

    max_concurrency: int | None = None
    """Calls of an ``async`` function that a rank may have open at once, shared evenly by its workers; null allows 256.
    A function that isn't ``async`` has one call open in each worker."""

    backend: Literal["processes", "ray"] = "processes"
    """Kind of the workers: ``processes`` on the rank's own machine, or ``ray`` actors anywhere in the Ray cluster,
    which replaces those that die."""

    timeout: float = 30.0
    """Seconds that one sample may take. A sample that takes longer is left out, and its worker is killed."""

    max_error_share: float = 0.1
    """Share of a batch, in ``[0, 1]``, that may be left out for errors and timeouts; above it the run stops. So does
    a run in which no response gets a reward, whatever the share."""

    def take_types(self) -> None:
        """Checks the types of all fields; a function that was given in Python becomes its name and itself."""
        if callable(self.function):
            object.__setattr__(self, "function", given_function(self.function))
        super().take_types()

    def __post_init__(self) -> None:
        self._check_functions()
        if self.num_workers < 1:
            raise ValueError(f"`num_workers` must be at least 1, got {self.num_workers}.")
        if self.max_concurrency is not None and self.max_concurrency < self.num_workers:
            raise ValueError(
                f"`max_concurrency` must be at least `num_workers` ({self.num_workers}), one call for each worker, got"
                f" {self.max_concurrency}."
            )
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"`timeout` must be a positive number of seconds, got {self.timeout}.")
        if not 0 <= self.max_error_share <= 1:
            raise ValueError(f"`max_error_share` must be between 0 and 1, got {self.max_error_share}.")
        if wrong := [name.partition("=")[0] for name in self.environment or () if not _VARIABLE.fullmatch(name)]:
            raise ValueError(
                "`environment` lists names of environment variables without their values, such as `OPENAI_API_KEY`; got"
                f" `{wrong[0]}`."
            )
        if self.backend not in ("processes", "ray"):
            raise ValueError(f"`backend` must be `processes` or `ray`, got {self.backend!r}.")

    @property
    def parts(self) -> list[WeightedReward]:
        """The functions whose weighted sum is the reward; one of weight 1 where there is one `function`."""
        if self.function is None:
            return self.functions
        return [WeightedReward(function=self.function, arguments=self.arguments)]

    @property
    def label(self) -> str:
        """The option with the functions, as messages name it."""
        if self.function is not None:
            return f"`function: {self.function}`"
        if self.model is not None and not self.functions:
            return f"`model: {self.model.path}`"
        return f"`functions: [{', '.join(part.function for part in self.functions)}]`"

    @property
    def concurrency(self) -> int:
        """Calls of an ``async`` function that one worker may have open at once."""
        return max(1, (self.max_concurrency or _MAX_CONCURRENCY) // self.num_workers)

    def _check_functions(self) -> None:
        if self.function is not None and self.functions:
            raise ValueError(
                f"`function` (`{self.function}`) and `functions` are both set. Leave one of them out: with `functions`,"
                " a file's `function` is taken back by `function: null`."
            )
        if self.function == "" or not (self.function or self.functions or self.model):
            raise ValueError("`function` must name the reward function, such as `gsm8k`, but it is empty.")
        if self.functions and self.arguments:
            raise ValueError("`arguments` are of the one `function`. Give each of the `functions` its own.")
        _check_names(self.functions)


def _check_names(parts: Sequence[WeightedReward]) -> None:
    if any(not part.function for part in parts):
        raise ValueError("each of the `functions` needs a `function`, such as `gsm8k`, but one is empty.")
    repeated = [name for name, count in Counter(part.label for part in parts).items() if count > 1]
    if repeated:
        raise ValueError(f"`functions` has several rewards of the name `{repeated[0]}`. Give each a `name` of its own.")
