"""Errors that are the user's to mend, told in a sentence, apart from our own faults, shown with their traceback."""

from __future__ import annotations

import dis
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from types import FrameType

RAISE = dis.opmap["RAISE_VARARGS"]


class RunError(RuntimeError):
    """A run that can't go on, for a reason that lies in its data, its rewards or its machine.

    A plain ``RuntimeError`` of this package says that its parts were used in the wrong order or answer what they must
    not, which is a fault of the package's own.
    """


class InternalValueError(ValueError):
    """A wrong value that one part of this package gave to another: a fault of the package's own."""


USERS_ERRORS = (ValueError, TypeError, OSError, ImportError, RunError)
"""Exceptions that this package raises for the user to mend, beside Lightning's `MisconfigurationException`."""

LIBRARIES_ERRORS = {
    ("lightning.fabric.utilities.exceptions", "MisconfigurationException"),
    ("wandb.errors.errors", "CommError"),
    ("wandb.errors.errors", "UsageError"),
}
"""Module and name of exceptions that are the user's to mend, wherever a library raises them."""


NO_PREDICT = (
    "`predict` is not offered. Sample with transformers or vLLM from the folder that `HFCheckpoint` or `verl-export`"
    " writes, in Python with `trainer.predict` of a `PPOModule`, or have `SamplesTable` keep the responses of"
    " `validate`."
)
"""Message about `predict`, which Lightning offers and this package does not, with what to use instead."""


def is_meant_for_user(error: BaseException) -> bool:
    """Tells whether an error was raised on purpose to say what the user must change: its traceback then adds nothing.

    True for `LIBRARIES_ERRORS`, and for `USERS_ERRORS` of a ``raise`` statement of this package.
    What a library raises, or a mistaken call of ours, keeps its traceback.
    """
    if any((kind.__module__, kind.__name__) in LIBRARIES_ERRORS for kind in type(error).__mro__):
        return True
    if not isinstance(error, USERS_ERRORS) or isinstance(error, InternalValueError) or error.__traceback__ is None:
        return False
    frame, instruction = innermost(error)
    return module_of(frame).startswith("verl_lightning.") and frame.f_code.co_code[instruction] == RAISE


@contextmanager
def told_of(key: str) -> Iterator[None]:
    """Puts the key of the settings in front of errors that come up within the block and are meant for the user."""
    try:
        yield
    except USERS_ERRORS as error:
        is_sentence = len(error.args) == 1 and isinstance(error.args[0], str)
        if is_sentence and is_meant_for_user(error) and not error.args[0].startswith(f"`{key}"):
            error.args = (f"`{key}`: {error.args[0]}",)
        raise


def cause_for_user(error: BaseException) -> BaseException | None:
    """The error that is meant for the user: this one, or one during whose handling it came up."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        if is_meant_for_user(found):
            return found
        seen.append(found)
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return None


def is_of_collective(error: BaseException) -> bool:
    """Tells whether an error came up in torch.distributed, often because another process had ended."""
    return error.__traceback__ is not None and module_of(innermost(error)[0]).startswith("torch.distributed.")


def innermost(error: BaseException) -> tuple[FrameType, int]:
    """The frame that an error was raised in, and the instruction that it was at."""
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame, trace.tb_lasti


def module_of(frame: FrameType) -> str:
    """Name of the module of a frame's code."""
    return str(frame.f_globals.get("__name__", ""))


def closest(name: str, names: Collection[str]) -> str:
    """Asks, with a leading space, whether the closest of some names was meant; empty if none is close."""
    matches = get_close_matches(name, names, n=1)
    return f" Did you mean `{matches[0]}`?" if matches else ""
