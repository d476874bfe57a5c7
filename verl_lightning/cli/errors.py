"""Reads jsonargparse's nested error texts and says in one sentence which setting is wrong and what was meant."""

from __future__ import annotations

import difflib
import re
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1]

KEY = re.compile(r'(?:Parser key "|--)([\w.]+)"?:\s*(.*)')
CLASS = re.compile(r"Problem with given class_path '([\w.]+)':")
EXPECTED = re.compile(
    r"(?:Expected an? |Import path does not correspond to |Not a valid (?=subclass))(?!dot import path|path but)(.+?)"
    r"(?:\. Got value: (.*))?"
)
GIVEN = re.compile(r"Given value: (.*)")
NESTED_VALUE = re.compile(r"NestedArg\(key='.*', val=(.*)\)")
UNKNOWN = re.compile(
    r"unrecognized arguments: (?:--)?(?P<flag>[^\s=]+)"
    r"|Option '(?P<option>[\w.]+)' is not accepted"
    r"|Group '(?P<group>[\w.]+)' does not accept option '(?P<member>[\w.]+)'"
    r"|Subcommand '\w+' does not accept option '(?P<setting>[\w.]+)'"
)
NO_CLASS = re.compile(r"Expected a dot import path string: (.*)")
MISSING = re.compile(r"the following arguments are required: (?:\w+\.(?=model\b))?(?P<keys>.*)")
NO_GROUP = re.compile(r"Unexpected import path format: ([\d.]+)")
BASE_CLASSES = ("LightningModule", "LightningDataModule", "Callback", "RolloutCallback")
NOISE = re.compile(
    r"Does not validate against any of the Union subtypes|Subtypes: .*|Errors:|Given value type: .*"
    r"|Expected a path but .* either not accessible or invalid|Subclass types expect one of:|a class path \(str\)"
    r"|a dict with.*|"
)

VERL_KEYS = {
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_adapter_path": "lora.adapter_path",
    "target_modules": "lora.target_modules",
    "exclude_modules": "lora.exclude_modules",
}
"""Key of this package by verl's flat LoRA key."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Error in one setting: its key and class, the reason, the types that were expected and the value that came."""

    key: str
    """Dotted key of the setting as the user would write it, empty if the message names none."""

    class_path: str | None = None
    """Class whose setting it is; None at top level."""

    reason: str = ""
    """The innermost message, empty for a value of a wrong type."""

    expected: tuple[str, ...] = ()
    """Types that the value may have."""

    got: str = ""
    """The value that the user gave."""

    @property
    def unknown_key(self) -> str:
        """Dotted key that no setting has, empty if the failure is another one."""
        match = UNKNOWN.search(self.reason)
        if match is None:
            return ""
        parts = [self.key, *(part for part in match.groups() if part)]
        return ".".join(part for part in parts if part)

    @property
    def owner(self) -> str:
        """Name of the class that has the setting, or of the command."""
        return self.class_path.rsplit(".", 1)[-1] if self.class_path else "verl-fit"

    @property
    def missing_keys(self) -> list[str]:
        """Dotted keys that have no default and no value, empty if the failure is another one."""
        match = MISSING.fullmatch(self.reason)
        keys = match["keys"].split(", ") if match else []
        return [f"{self.key}.{key}" if self.key else key for key in keys]

    @property
    def unknown_class(self) -> str:
        """Class name that could not be resolved, empty if the failure is another one."""
        match = NO_CLASS.fullmatch(self.reason)
        return match[1] if match else ""


def read_failure(message: str) -> Failure:
    """Finds the innermost failure in an error text of jsonargparse.

    The text nests: a key, a class, a key of that class and so on, with one branch for each type of a union. The first
    branch that says more than "not this type" is the one that the user meant.
    """
    keys: list[str] = []
    class_path, reason, got = None, "", ""
    expected: list[str] = []
    for line in message.splitlines():
        text = line.strip().removeprefix("- ")
        if match := KEY.fullmatch(text):
            keys.append(match[1].replace("init_args.", ""))
            text = match[2]
        if match := CLASS.fullmatch(text):
            class_path = match[1]
        elif match := GIVEN.fullmatch(text):
            got = read_value(match[1])
            break
        elif match := EXPECTED.fullmatch(text):
            expected.append(readable_type(match[1]))
            if match[2] is not None:
                got = match[2]
                break
        elif not NOISE.fullmatch(text):
            reason = text
            break
    failure_types = () if reason else tuple(dict.fromkeys(expected))
    return Failure(key=".".join(keys), class_path=class_path, reason=reason, expected=failure_types, got=got)


def describe(failure: Failure, known_keys: Iterable[str], known_classes: Iterable[str], command: str) -> str:
    """Describes a failure in one or two sentences: what came, what was expected, and the closest name.

    Args:
        failure: Error in one setting.
        known_keys: Dotted keys that exist where the failure is.
        known_classes: Names of classes that a `class_path` may give without their module.
        command: Command line whose help lists the settings, such as `verl-fit fit --help all`.
    """
    name = f"`{failure.key}`"
    if "class_path" in failure.unknown_key.split("."):
        return f"{name}: put the settings of a class under `init_args`, beside `class_path`."
    if failure.unknown_key and failure.owner in BASE_CLASSES:
        return f"{name}: say which class it is, as `{failure.key}.class_path`, before its settings."
    if failure.unknown_key:
        hint = (
            verl_name(failure.unknown_key)
            or did_you_mean(failure.unknown_key, known_keys)
            or f" `{command}` lists all settings."
        )
        return f"`{failure.unknown_key}` is not a setting of `{failure.owner}`.{hint}"
    if failure.unknown_class:
        others = set(known_classes) - {failure.unknown_class}
        hint = did_you_mean(failure.unknown_class, others) or " Give its name with its module: `module.Class`."
        return f"{name}: there is no class `{failure.unknown_class}` to choose here.{hint}"
    if match := NO_GROUP.fullmatch(failure.reason):
        return f"{name} is a group of settings, got {match[1]}. Set one of them, as `--{failure.key}.NAME {match[1]}`."
    if failure.missing_keys:
        return f"`{failure.owner}` needs " + " and ".join(f"`{key}`" for key in failure.missing_keys) + "."
    if failure.expected:
        return f"{name}: expected {' or '.join(failure.expected)}, got {failure.got!r}."
    return f"{name}: {failure.reason}" if failure.key else failure.reason


def with_full_keys(message: str, place: str, settings: Iterable[str]) -> str:
    """Completes the keys of a message that a group of settings has written without knowing where it stands.

    Args:
        message: Text with keys in backticks, such as `lr` or `optim.lr`.
        place: Dotted key of the group, such as `model.actor.optim`.
        settings: Names of the group's settings.
    """
    parent, _, group = place.rpartition(".")
    begins = {group: parent} | dict.fromkeys(settings, place)

    def complete(match: re.Match[str]) -> str:
        before = begins.get(match["first"], "")
        return f"`{before}.{match['first']}" if before else match[0]

    return re.sub(r"(?<!`)`(?P<first>[a-z_]+)(?=[`.:])", complete, message)


def of_trainer(message: str, settings: Iterable[str]) -> str:
    """Puts the key of the Trainer's setting before a message of Lightning's that names it as Python does.

    Args:
        message: Lightning's sentence.
        settings: Names of the Trainer's settings.
    """
    if "`trainer." in message:
        return message
    known, words = set(settings), re.findall(r"\w+", message.replace("Timer(duration", "max_time"))
    name = next((word for word in words if word in known), "")
    return f"`trainer.{name}`: {message}" if name else f"`trainer`: {message}"


def place_in_users_code(error: BaseException | None) -> str:
    """Says in brackets where code of the user's failed while it was imported; nothing for an error of other code."""
    while error is not None and (deeper := error.__cause__ or error.__context__) is not None:
        error = deeper
    frames = [] if error is None else traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].filename.startswith("<"):
        return ""
    file, libraries = Path(frames[-1].filename), (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), PACKAGE)
    if any(file.is_relative_to(library) for library in libraries):
        return ""
    return f" ({type(error).__name__} in `{file}`, line {frames[-1].lineno})"


def verl_name(wrong: str) -> str:
    """Says what one of verl's flat keys is called here, in a sentence with a leading space; empty for other keys."""
    group, _, leaf = wrong.rpartition(".")
    return f" verl's `{leaf}` is `{group}.{VERL_KEYS[leaf]}` here." if leaf in VERL_KEYS else ""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """The closest known name as a question with a leading space, or nothing if none is close.

    Letters may be small or capital, and the beginning of a class's name, such as `vllm`, is close to it.
    """
    others = {name for name in known if not wrong.startswith(f"{name}.")}
    closest = max(sorted(others), key=lambda name: similarity(wrong, name), default="")
    return f" Did you mean `{closest}`?" if similarity(wrong, closest) >= 0.6 else ""


def similarity(key: str, other: str) -> float:
    """Measures how alike two dotted keys are, from 0 to 1, once the groups that both start with are left out."""
    parts, other_parts = key.casefold().split("."), other.casefold().split(".")
    while len(parts) > 1 and len(other_parts) > 1 and parts[0] == other_parts[0]:
        parts, other_parts = parts[1:], other_parts[1:]
    ratio = difflib.SequenceMatcher(None, ".".join(parts), ".".join(other_parts)).ratio()
    if len(parts) == 1 and len(other_parts) > 1 and other_parts[-1] == parts[0]:
        return 0.9  # the group between was left out, as in `model.actor.lr`
    begins = len(key) > 1 and "." not in other and other.casefold().startswith(key.casefold())
    return max(ratio, 0.6) if begins else ratio


def readable_type(text: str) -> str:
    """A type as YAML users know it: `float` for `<class 'float'>`, `one of 'a', 'b'` for a Literal."""
    if match := re.fullmatch(r"typing\.Literal\[(.*)\]", text):
        return f"one of {match[1]}"
    if match := re.fullmatch(r"<class '(?:[\w.]+\.)?(\w+)'>", text):
        return "null" if match[1] == "NoneType" else match[1]
    return text


def read_value(text: str) -> str:
    """The value that the user wrote, without jsonargparse's wrapping."""
    match = NESTED_VALUE.fullmatch(text)
    return (match[1] if match else text).strip("'")
