"""Options at the top of a command line: the trainer, strategies, the model, its data, and callbacks with a key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from verl_lightning.cli.preflight.option_types import ANYTHING, OptionType
from verl_lightning.cli.preflight.sources import find_class, named_class, subclasses

LIGHTNING = "lightning.pytorch"
TRAINER = f"{LIGHTNING}.trainer.trainer.Trainer"
CHOICES = {
    "model": f"{LIGHTNING}.core.module.LightningModule",
    "data": f"{LIGHTNING}.core.datamodule.LightningDataModule",
    "profile": "verl_lightning.callbacks.profiler.ProfilerCallback",
    "rollout": "verl_lightning.callbacks.rollout.RolloutCallback",
}
"""Path of the base class by key, for objects that are chosen by a ``class_path``."""

STRATEGIES = {
    "ddp": "verl_lightning.strategies.ddp.DDPStrategy",
    "fsdp": "verl_lightning.strategies.fsdp.strategy.FSDPStrategy",
    "megatron": "verl_lightning.strategies.megatron.strategy.MegatronStrategy",
}
"""Path of the class by key, for strategies, whose settings may stand there whichever is chosen."""

ALWAYS = {"preemption": "verl_lightning.modules.preemption.Preemption"}
"""Path of the class by key, for callbacks that every run has."""

PARSERS_OWN = ("config", "help", "print_config", "name", "seed_everything")


def root_options(command: str) -> Mapping[str, OptionType] | None:
    """Returns the top-level options of a subcommand by name; None if Lightning is not where it should be."""
    trainer = find_class(TRAINER)
    own = None if trainer is None else trainer.arguments(command)
    if trainer is None or own is None:
        return None
    groups = {key: find_class(path) for key, path in (STRATEGIES | ALWAYS).items()}
    bases = {key: find_class(path) for key, path in CHOICES.items()}
    return {
        **dict.fromkeys((*PARSERS_OWN, *own), ANYTHING),
        "trainer": OptionType(parts=(trainer,)),
        **{key: ANYTHING if cls is None else OptionType(parts=(cls,)) for key, cls in groups.items()},
        **{key: ANYTHING if cls is None else OptionType(bases=(cls,), is_null=True) for key, cls in bases.items()},
    }


def dotted(options: Mapping[str, OptionType] | None) -> Iterator[str]:
    """Names of options, those of plain groups one by one behind the group's."""
    for name, kind in (options or {}).items():
        if kind.is_group:
            yield from (f"{name}.{inner}" for inner in dotted(kind.parts[0].options))
        else:
            yield name


def dotted_within(options: Mapping[str, OptionType] | None) -> Iterator[str]:
    """Names of options, those of all groups one by one behind the group's: of groups too that have a short form."""
    for name, kind in (options or {}).items():
        yield name
        for part in kind.parts:
            yield from (f"{name}.{inner}" for inner in dotted_within(part.options))


def dotted_of_choices() -> Iterator[str]:
    """Names of the options of every class of this package that stands at the top."""
    for key, base in CHOICES.items():
        for cls in filter(None, map(named_class, subclasses(base.rpartition(".")[2]))):
            yield from (f"{key}.{option}" for option in dotted_within(cls.options))
