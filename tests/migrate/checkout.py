"""What bash and Hydra make of the run scripts of a checkout of verl's, to compare with what we read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from verl_lightning.migrate import ppo, sft
from verl_lightning.migrate.composing import flatten, plain
from verl_lightning.migrate.parts import VerlConfig
from verl_lightning.migrate.report import is_sft, is_unknown
from verl_lightning.migrate.scripts import Script

HOME = "/home/me"
STUB = """
record() { printf '%s\\0' "$@" $'\\n' >> "$CAPTURE"; }
python3() { [ "$1" != -c ] && record python3 "$@"; }
mkdir() { :; }
tee() { :; }
set() { :; }
exit() { :; }
command_not_found_handle() { record "$@"; }
"""
"""Programs that write their arguments down, but for `tee`, which would do so beside the one that it reads from;
`python3 -c` fails, as where a package is missing."""


def bash_commands(script: Path, folder: Path) -> list[list[str]]:
    """Runs a script with stubs for all programs, and returns the words of each that it starts."""
    (folder / "stub.sh").write_text(STUB)
    capture = folder / "capture"
    capture.unlink(missing_ok=True)
    environment = {"PATH": "/nowhere", "HOME": HOME, "BASH_ENV": str(folder / "stub.sh"), "CAPTURE": str(capture)}
    subprocess.run(
        ["/bin/bash", str(script)], cwd=folder, env=environment, capture_output=True, timeout=60, check=False
    )
    text = capture.read_text() if capture.exists() else ""
    return [command.split("\0")[:-1] for command in text.split("\n\0") if command]


def hydra_values(
    checkout: Path, jobs: Sequence[tuple[Path, str, list[str]]], packages: str
) -> list[dict[str, Any] | str]:
    """Returns what Hydra composes, by dotted key, or its refusal.

    Args:
        checkout: Folder from which verl is started.
        jobs: Folder, primary file and overrides of each configuration.
        packages: Folder in which hydra-core is installed; its ANTLR is older than that of others.
    """
    process = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compose_with_hydra.py"))],
        input=json.dumps([[str(folder), name, overrides] for folder, name, overrides in jobs]),
        env=os.environ | {"PYTHONPATH": packages}, cwd=checkout, capture_output=True, text=True, check=True,
    )  # fmt: skip
    composed = json.loads(process.stdout)
    return [each if isinstance(each, str) else flatten(each) for each in composed]


def scripts_of(checkout: Path) -> Iterator[Path]:
    """Yields the scripts of a checkout."""
    yield from sorted(checkout.rglob("*.sh"))


def same(ours: Any, theirs: Any) -> bool:
    """Tells whether two values are one: numbers in any form, empty in any form."""
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    ours, theirs = plain(ours), plain(theirs)
    if ours in (None, [], {}, "") and theirs in (None, [], {}, ""):
        return True
    return bool(ours == theirs) and isinstance(ours, bool) == isinstance(theirs, bool)


CONFIGS = {
    "fully_async": "verl/experimental/fully_async_policy/config/fully_async_ppo",
    "one_step_off": "verl/experimental/one_step_off_policy/config/one_step_off_ppo",
    "sft_trainer": "verl/trainer/config/sft",
    "main_ppo": "verl/trainer/config/ppo",
}
"""Beginning of the primary file of each entry point, by a part of its module's name."""


class RecordingConfig(VerlConfig):
    """Values of a run that notes which of them a translation asks for."""

    read: ClassVar[set[str]] = set()

    def __getitem__(self, key: str) -> Any:
        """Returns a value, and notes its key."""
        self.read.add(key)
        return super().__getitem__(key)


def keys_read(given: dict[str, Any]) -> dict[str, Any]:
    """Returns what the translation of a run asks for: values that were given, or verl's own as we know them."""
    known = {key: value for key, value in given.items() if not is_unknown(value)}
    form, translate = (sft, sft.translate_sft) if is_sft(given) else (ppo, ppo.translate_ppo)
    config = RecordingConfig(known, form.DEFAULTS)
    RecordingConfig.read.clear()
    list(translate(config))
    return {key: VerlConfig.__getitem__(config, key) for key in sorted(RecordingConfig.read)}


def primary_of(checkout: Path, script: Script, words: Sequence[str]) -> tuple[Path, str] | None:
    """Returns the folder and name of the primary file that a command composes; None if it isn't known."""
    entry = next((path for name, path in CONFIGS.items() if any(name in word for word in words)), None)
    if entry is None or (script.config_path and "config" not in script.config_path):
        return None
    base = checkout / entry
    default = "sft_trainer_engine" if base.name == "sft" else f"{base.name}_trainer"
    name = script.config_name or default
    folder = base.parent
    return (folder, name) if (folder / f"{name}.yaml").is_file() else None
