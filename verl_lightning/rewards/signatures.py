"""The ways in which reward functions are called: with one sample, or with keywords as verl and TRL do."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_lightning.faults import closest
from verl_lightning.rewards.base import RewardSample
from verl_lightning.rewards.returned import RewardMistakeError, check_list, check_reward

_FORMS = (
    "It must take one `RewardSample`; or, as in verl, `data_source, solution_str, ground_truth, extra_info` or lists"
    " of them, `data_sources, solution_strs, ground_truths, extra_infos`; or, as in TRL, `prompts, completions` and"
    " columns of the data by name."
)


@dataclass(frozen=True, kw_only=True)
class Convention:
    """A way of calling reward functions by keywords."""

    markers: tuple[str, ...]
    """The parameters by which such a function is known; one of them has no default."""

    is_batched: bool
    """True if each keyword is a list, with one element a sample."""

    keywords: Callable[[Sequence[RewardSample]], dict[str, Any]]
    """Function from samples to all keywords that a reward function may ask for."""

    only: tuple[str, ...] | None = None
    """Names of the keywords; None where the data's columns are among them."""

    lacks: tuple[str, ...] = ()
    """Keywords that another library gives and that we don't have."""

    reward_key: str = "reward"
    """Key under which a mapping may hold the reward."""


def _verl_keywords(samples: Sequence[RewardSample]) -> dict[str, Any]:
    (sample,) = samples
    return {
        "data_source": sample.data_source,
        "solution_str": sample.response,
        "ground_truth": sample.ground_truth,
        "extra_info": sample.extra_info,
    }


def _verl_lists(samples: Sequence[RewardSample]) -> dict[str, Any]:
    of_each = [_verl_keywords([sample]) for sample in samples]
    return {plural: [keywords[name] for keywords in of_each] for name, plural in _PLURALS.items()}


_PLURALS = {
    "data_source": "data_sources",
    "solution_str": "solution_strs",
    "ground_truth": "ground_truths",
    "extra_info": "extra_infos",
}


def _trl_keywords(samples: Sequence[RewardSample]) -> dict[str, Any]:
    names = dict.fromkeys(name for sample in samples for name in sample.extra_info)
    return {name: [sample.extra_info.get(name) for sample in samples] for name in names} | {
        "data_source": [sample.data_source for sample in samples],
        "ground_truth": [sample.ground_truth for sample in samples],
        "extra_info": [sample.extra_info for sample in samples],
        "prompts": [sample.prompt for sample in samples],
        "completion_ids": [sample.token_ids for sample in samples],
        "completions": [[{"role": "assistant", "content": sample.response}] for sample in samples],
    }


CONVENTIONS = (
    Convention(
        markers=("solution_str",), is_batched=False, keywords=_verl_keywords, only=tuple(_PLURALS), reward_key="score"
    ),
    Convention(
        markers=("solution_strs",),
        is_batched=True,
        keywords=_verl_lists,
        only=tuple(_PLURALS.values()),
        reward_key="score",
    ),
    Convention(
        markers=("completions", "completion_ids"),
        is_batched=True,
        keywords=_trl_keywords,
        lacks=("trainer_state", "log_extra", "log_metric", "environments"),
    ),
)


class BoundReward:
    """A reward function with its arguments, behind one way of calling it.

    Args:
        name: Its name in the settings.
        function: The user's function.
        arguments: Keyword arguments of each call.

    Raises:
        ValueError: If the function can't be called in any way, or does not take the arguments.
    """

    def __init__(self, name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._function = function
        self._arguments = dict(arguments)
        self._signature = _signature(name, function)
        self._convention = find_convention(self._signature)
        self._needed = _needed(self._signature)
        self.is_async = _is_async(function)
        self._check_arguments(name)

    @property
    def is_batched(self) -> bool:
        """True if a call judges several responses to a prompt at once."""
        return self._convention is not None and self._convention.is_batched

    def judge(self, samples: Sequence[RewardSample]) -> list[Any]:
        """Calls the function, and returns what it returned for each sample.

        Args:
            samples: One sample, or several if the function is batched.

        Raises:
            RewardMistakeError: If the samples lack what the function asks for, or if it did not return one reward for
                each.
            Exception: Whatever the function raises.
        """
        returned = self._call(samples)
        if inspect.isawaitable(returned):
            if inspect.iscoroutine(returned):
                returned.close()
            raise RewardMistakeError("The function returned something to wait for. Define it with `async def`.")
        return self._one_each(returned, len(samples))

    async def judge_async(self, samples: Sequence[RewardSample]) -> list[Any]:
        """Calls an ``async`` function and waits for it; else as `judge`."""
        awaitable: Awaitable[Any] = self._call(samples)
        return self._one_each(await awaitable, len(samples))

    def _one_each(self, returned: Any, length: int) -> list[Any]:
        return check_list(returned, length) if self.is_batched else [returned]

    def _call(self, samples: Sequence[RewardSample]) -> Any:
        if self._convention is None:
            return self._function(samples[0], **self._arguments)
        keywords = self._accepted(self._convention.keywords(samples)) | self._arguments
        if missing := [name for name in self._needed if name not in keywords]:
            raise RewardMistakeError(
                f"The function takes {_listed(missing)}, which neither the row nor `model.reward.arguments` has. The"
                f" row's own columns, `extra_info` included, are: {', '.join(samples[0].extra_info) or 'none'}."
            )
        return self._function(**keywords)

    def check(self, returned: Any) -> dict[str, Any]:
        """Splits what was returned for one sample: see `check_reward`."""
        return check_reward(returned, key="reward" if self._convention is None else self._convention.reward_key)

    def _accepted(self, keywords: dict[str, Any]) -> dict[str, Any]:
        if _takes_any(self._signature):
            return keywords
        return {name: value for name, value in keywords.items() if name in self._signature.parameters}

    def _check_arguments(self, name: str) -> None:
        given = () if self._convention is None else self._convention.only or ()
        names = [parameter for parameter in self._signature.parameters if parameter not in given]
        names = names[1:] if self._convention is None else names  # the first one takes the sample
        for argument in self._arguments:
            if argument in given or (argument not in names and not _takes_any(self._signature)):
                raise ValueError(
                    f"The reward `function: {name}` takes no argument `{argument}`.{closest(argument, names)}"
                    f" Its arguments are: {', '.join(names) or 'none'}."
                )
        if problem := self._problem(given):
            raise ValueError(
                f"The reward `function: {name}` can't be called with the given `arguments`"
                f" ({', '.join(self._arguments) or 'none'}): {problem}. Its signature is `{self._signature}`. {_FORMS}"
            )

    def _problem(self, given: Collection[str]) -> str | None:
        """Returns the reason why any call would fail; None if one would do."""
        if self._convention is None:
            try:
                self._signature.bind(None, **self._arguments)
            except TypeError as error:
                return str(error)
            return None
        missing = [name for name in self._needed if name not in given and name not in self._arguments]
        if self._convention.only is None:  # the rows' columns are not known yet
            missing = [name for name in missing if name in self._convention.lacks]
        return f"nothing gives it {_listed(missing)}" if missing else None


def find_convention(signature: inspect.Signature) -> Convention | None:
    """Finds the convention by which a function is called; None for a function that takes a sample."""
    needed = set(_needed(signature))
    return next((convention for convention in CONVENTIONS if needed & set(convention.markers)), None)


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004  of an object with an `async` method
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _signature(name: str, function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:  # of some functions that are written in C
        raise ValueError(
            f"The reward `function: {name}` does not say what it takes ({error}). Wrap it in a function of a file."
        ) from error


def _needed(signature: inspect.Signature) -> list[str]:
    """Returns the names of the parameters without a default."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = signature.parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


def _takes_any(signature: inspect.Signature) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
