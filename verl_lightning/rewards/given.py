"""Reward functions that were given in Python, and how they reach the workers: through their pipes, from no file."""

from __future__ import annotations

import base64
import inspect
import pickle
from collections.abc import Callable
from typing import Any


class GivenFunction(str):
    """The name of a function, for messages and settings, with the function itself in the form in which workers get it.

    A name that was read from a file is a plain text, with which no function comes along.
    """

    __slots__ = ("pickled",)
    pickled: bytes

    def __new__(cls, name: str, pickled: bytes) -> GivenFunction:
        """Makes the name of a function that has been pickled."""
        made = super().__new__(cls, name)
        made.pickled = pickled
        return made

    def __getnewargs__(self) -> tuple[str, bytes]:  # type: ignore[override]
        """Returns what a copy is made of."""
        return str(self), self.pickled


def given_function(
    function: Callable[..., Any], key: str = "model.reward", workers: str = "reward workers"
) -> GivenFunction:
    """Takes a function as it is now, with what it reads of its notebook or script.

    Args:
        function: Any callable; a reward is one of a sample, or of keywords as in ``signatures.py``.
        key: Option under which it was given, in messages.
        workers: Name of the processes that get it, in messages.

    Raises:
        TypeError: If it can't be sent to another process, or is a class.
    """
    import cloudpickle  # late: only such functions need it

    name = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', type(function).__name__)}"
    if inspect.isclass(function):
        raise TypeError(f"`{key}`: expected a function, got the class `{name}`. Give `{function.__name__}()`.")
    try:
        return GivenFunction(name, cloudpickle.dumps(function))
    except (TypeError, pickle.PicklingError, AttributeError, RecursionError) as error:
        raise TypeError(
            f"`{key}`: the function `{name}` can't be sent to the {workers} ({error}). Have it make what it"
            " needs, such as a client or a lock, when it is called, or write it into a file: `my_file.py:name`."
        ) from error


def to_wire(function: str) -> str | dict[str, str]:
    """Returns a function's name, or name and pickle of a given one, as JSON can hold them."""
    if not isinstance(function, GivenFunction):
        return function
    return {"name": str(function), "pickled": base64.b64encode(function.pickled).decode()}


def from_wire(sent: dict[str, str]) -> tuple[str, Any]:
    """Returns name and function of what the parent has sent; in a worker.

    Raises:
        ValueError: If the function does not load.
    """
    try:
        return sent["name"], pickle.loads(base64.b64decode(sent["pickled"]))
    except BaseException as error:  # what it imports may raise anything, `sys.exit` included
        raise ValueError(
            f"The function `{sent['name']}` does not load in a worker process: {type(error).__name__}: {error}."
            " Modules that it imports must be where Python finds them."
        ) from error
