"""The base of all modules: a tokenizer, the strategy's contract, phases, schedules and safe checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, Self

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from verl_lightning.compat.lightning import has_training_data, hide_tips, hide_training_warnings, is_compiled
from verl_lightning.compat.torch import hide_schedule_warning
from verl_lightning.faults import NO_PREDICT, told_of
from verl_lightning.metrics import MetricTable
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.fingerprint import with_frozen, without_frozen
from verl_lightning.models.lora import has_adapters
from verl_lightning.models.pretrained import read_config, read_generation_config
from verl_lightning.models.processor import ImageProcessor, image_processor
from verl_lightning.models.scorer import TokenScorer
from verl_lightning.models.size import ModelRole
from verl_lightning.models.tokenizer import load_tokenizer
from verl_lightning.models.vision import PACKED
from verl_lightning.modules.checkpoint_contents import check_description, describe, saved_models
from verl_lightning.modules.doubtful import ask_about_rates, check_plan
from verl_lightning.modules.generating import generate
from verl_lightning.modules.monitors import check_monitors
from verl_lightning.modules.own_callbacks import check_callback, own_callbacks
from verl_lightning.modules.preemption import preemption_of
from verl_lightning.modules.resume_checks import (
    IDENTITIES_KEY,
    Identity,
    check_identities,
    reference_identity,
    references,
    saved_identities,
    tokenizer_identities,
)
from verl_lightning.modules.run_lock import lock_first
from verl_lightning.modules.run_settings import SETTINGS_KEY, tell_changes, training_settings
from verl_lightning.modules.schedules import make_schedule
from verl_lightning.modules.weight_averaging import choose_weights, drop_frozen_current
from verl_lightning.needs import no_data
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.seeding import reseed, run_seed
from verl_lightning.strategies.base import PostTrainingStrategy, as_contract
from verl_lightning.strategies.checkpoint_io import AtomicCheckpointIO
from verl_lightning.telemetry.batch_phases import FORWARD_BACKWARD, OPTIMIZER
from verl_lightning.telemetry.memory_plan import ModelSizes
from verl_lightning.telemetry.phases import (
    SAVE_CHECKPOINT,
    PhaseClock,
    PhaseEndListener,
    PhaseListener,
    span_metrics,
)
from verl_lightning.telemetry.speed import Work, training_work
from verl_lightning.trainer_numbers import LEAST, SHARES, wrong_numbers


class PostTrainingModule(LightningModule):
    """A policy in training.

    Args:
        policy_config: The policy's model, which brings the run's tokenizer and chat template.
    """

    def __init__(self, policy_config: ModelConfig) -> None:
        super().__init__()
        self.policy_config = policy_config
        self.clock = PhaseClock()
        self._start: str | None = None  # fingerprint of the policy before its training, where it may be a reference
        self._passed_on: dict[str, Mapping[str, str]] = {}  # identities of references of earlier runs
        self._listeners: tuple[tuple[int, ...], tuple[list[PhaseListener], list[PhaseEndListener]]] | None = None
        hide_tips()
        hide_training_warnings()
        hide_schedule_warning()

    @property
    def policy(self) -> TokenScorer:
        """The model that answers prompts."""
        raise NotImplementedError

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer: pads on the left, has a chat template."""
        with told_of("model.actor"):
            return load_tokenizer(self.policy_config.path)

    @cached_property
    def processor(self) -> ImageProcessor | None:
        """The policy's processor of images; None for a text model."""
        with told_of("model.actor"):
            return image_processor(self.policy_config.path)

    def image_obstacle(self) -> str | None:
        """Returns why this run can't learn from images, as the end of a sentence; None if it can."""
        if getattr(self, "distillation", None) is not None:
            return "teachers read text alone so far. Take `model.teacher` out."
        kind = read_config(self.policy_config.path).model_type
        if self.policy_config.packing == "always" and kind not in PACKED:
            return f"`packing: always` does not fit: a `{kind}` reads images in padded batches alone. Set `auto`."
        for role in self.roles:
            if (other := read_config(role.config.path).model_type) != kind:
                return f"`{role.key}` is a `{other}`, which does not read images as the policy, a `{kind}`, does."
        return self.contract.image_obstacle

    def check_images(self, images: object) -> None:
        """Checks that this run can learn from the images of a batch, where it has some.

        Raises:
            MisconfigurationException: If it can't.
        """
        if images is not None and (obstacle := self.image_obstacle()) is not None:
            raise MisconfigurationException(f"There are images in the rows of a loader, but {obstacle}")

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a response: the tokenizer's and those of the model's generation config.

        Raises:
            ValueError: If there are none.
        """
        stored = read_generation_config(self.policy_config.path)
        ids = None if stored is None else stored.eos_token_id
        found = {self.tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])} - {None}
        if not found:
            raise ValueError(
                f"`{self.policy_config.path}` names no token that ends a response. Set `eos_token` in its"
                " `tokenizer_config.json`, or `eos_token_id` in its `generation_config.json`."
            )
        return sorted(found)

    @cached_property
    def num_embeddings(self) -> int:
        """Tokens that the policy has an embedding of; ids from it on can't be looked up."""
        return int(read_config(self.policy_config.path).get_text_config().vocab_size)

    @cached_property
    def base_fingerprints(self) -> dict[str, str]:
        """Fingerprints of the frozen weights under each role's adapters; empty without adapters. Collective."""
        models = saved_models(self).items()
        return {name: model.base_fingerprint() for name, model in models if has_adapters(model.backbone)}

    @cached_property
    def identities(self) -> dict[str, Identity]:
        """Identities of what the run needs and no checkpoint holds; a resumed run refuses others. Collective."""
        return self.find_identities()

    def find_identities(self) -> dict[str, Identity]:
        """Finds the `identities` anew. Collective."""
        found = tokenizer_identities(self.tokenizer, self.policy_config.path)
        if self._start is not None and self.trainer.state.fn == TrainerFn.FITTING:  # else nothing asks it
            found |= reference_identity(self.policy_config, self._start, is_needed=self.has_reference)
        return found

    @property
    def has_reference(self) -> bool:
        """True if the policy is compared with what it was before its training."""
        return False

    def note_start(self) -> None:
        """Notes the policy before its training, once, for runs that will compare with it. Collective."""
        if self._start is None:
            self._start = self.policy.base_fingerprint()

    def told_settings(self) -> dict[str, Any]:
        """Returns the settings, by the user's keys, whose changes are reported when a run is resumed."""
        return training_settings(self.roles)

    @property
    def contract(self) -> PostTrainingStrategy:
        """The strategy's operations."""
        return as_contract(self.trainer.strategy)

    @property
    def phases(self) -> tuple[str, ...]:
        """Names of the phases of an iteration, in their order."""
        return (FORWARD_BACKWARD, OPTIMIZER, SAVE_CHECKPOINT)

    @property
    def roles(self) -> list[ModelRole]:
        """The models that `configure_model` makes: one in training."""
        return [ModelRole("actor", self.policy_config, "policy", trainable=True)]

    @property
    def tokens_per_pass(self) -> int | None:
        """Most tokens of a forward and backward pass on one rank, padding included; None where not known."""
        return None

    @cached_property
    def model_sizes(self) -> ModelSizes:
        """Sizes of the models that the module makes, measured without making them."""
        return ModelSizes.of(self)

    @property
    def accumulates(self) -> bool:
        """True if an optimizer step may have several forward and backward passes."""
        return True

    @property
    def validation_metrics(self) -> set[str] | None:
        """Names below ``val/`` of what a validation logs; None where they are not known."""
        return None

    task: ClassVar[str] = "PPO"
    """Name of what is learnt, for checkpoints."""

    pass_key = "data.batch_size"
    """The option that says how large a pass is."""

    @cached_property
    def work(self) -> list[Work]:
        """Matrix products of each phase, from which its use of the devices follows: one model in training."""
        return [training_work("actor", "step", self.policy)]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Marks a phase of an iteration: for profilers, for the progress bar, and for ``timing_s/<name>``.

        Must not lie within another phase: the times of all phases add up.
        """
        starts, ends = self._phase_listeners
        for listener in starts:
            listener.on_phase_start(self, name)
        label = f"[{type(self).__name__}]{name}"
        with self.trainer.profiler.profile(label), self.clock.measure(name) as span:  # type: ignore[attr-defined]
            yield
        for hears_end in ends:
            hears_end.on_phase_end(self, span)

    @property
    def _phase_listeners(self) -> tuple[list[PhaseListener], list[PhaseEndListener]]:
        """Callbacks that hear of phases; found once per list of callbacks, as `isinstance` of protocols is slow."""
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        key = tuple(map(id, callbacks))
        if self._listeners is None or self._listeners[0] != key:
            starts: list[PhaseListener] = [callback for callback in callbacks if isinstance(callback, PhaseListener)]
            ends: list[PhaseEndListener] = [
                callback for callback in callbacks if isinstance(callback, PhaseEndListener)
            ]
            self._listeners = (key, (starts, ends))
        return self._listeners[1]

    def take_timings(self) -> dict[str, float]:
        """Seconds and memory, over ranks, of each phase since the last call and of all that time. Collective."""
        table = MetricTable()
        table.add(span_metrics(self.clock.take()))
        return table.reduce(self.contract.gather_over_data_parallel)

    def print_table(self, table: Table) -> None:
        """Shows a table to people, on one rank, above the progress bar."""
        console = Console(width=100)
        with console.capture() as capture:
            console.print(table)
        self.print(capture.get())

    @classmethod
    @override
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Refuses, with what to use instead: a checkpoint has no settings, and models are built under a strategy.

        Raises:
            MisconfigurationException: Always.
        """
        raise MisconfigurationException(
            f"`{cls.__name__}.load_from_checkpoint`: a checkpoint holds weights and no settings, and models are built"
            " by a trainer's strategy. Make the module as for training and give the path to the trainer, such as"
            f" `trainer.validate(module, data, ckpt_path={str(checkpoint_path)!r})`; for the model alone run"
            " `verl-export`."
        )

    def generate(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> str:
        """Answers a conversation with the policy as it is now; before training, with the model at its path.

        Args:
            messages: Chat messages, each with ``role`` and ``content``; a text is what the user says.
            max_new_tokens: Longest answer, in tokens.
            temperature: Softmax temperature; 0 is greedy.
            seed: Seed of an answer that is not greedy.
        """
        return generate(self, messages, SamplingConfig(max_new_tokens=max_new_tokens, temperature=temperature), seed)

    @override
    def configure_callbacks(self) -> Sequence[Callback]:
        # The first hook of all, before Lightning's own refusals, which can't name our options.
        if self.trainer.predicting and type(self).predict_step is LightningModule.predict_step:
            raise MisconfigurationException(NO_PREDICT)
        if self.trainer.state.fn == TrainerFn.FITTING and not has_training_data(self.trainer):
            raise MisconfigurationException(no_data(type(self).__name__))
        numbers = {name: getattr(self.trainer, name, None) for name in (*LEAST, *SHARES)}
        for complaint in wrong_numbers(numbers):
            raise MisconfigurationException(complaint)
        if is_compiled(self):
            raise MisconfigurationException(
                f"`torch.compile({type(self).__name__})` would compile hooks, not models, which are built later. Leave"
                " it out; `FSDPStrategy(compile=True)` (`fsdp.compile: true`) compiles each block of the models."
            )
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            self.check_callback(callback)
        check_monitors(callbacks, self)
        lock_first(self.trainer)
        return own_callbacks(
            self.trainer,
            automatic_optimization=self.automatic_optimization,
            holds_whole_models=self.contract.holds_whole_models,
        )

    @override
    def setup(self, stage: str) -> None:
        if stage == "fit":
            ask_about_rates(self.roles)
            check_plan(self.trainer)
        strategy = self.trainer.strategy
        self.__dict__.pop("identities", None)  # of another stage
        self.clock.use(strategy.root_device)
        if type(strategy.checkpoint_io) is TorchCheckpointIO:  # the default, not a choice of the user's
            strategy.checkpoint_io = AtomicCheckpointIO()

    def check_callback(self, callback: Callback) -> None:
        """Refuses a callback that would do nothing, or harm, in silence.

        Raises:
            MisconfigurationException: With what to use instead.
        """
        check_callback(callback)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Libraries draw dropout from the global streams; seeded by the batch, a resumed run draws the same.
        batches = self.trainer.fit_loop.epoch_loop.total_batch_idx
        reseed(run_seed(), "train", batches, self.trainer.global_rank)

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._end_if_told()

    @override
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._end_if_told()

    @override
    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._end_if_told()

    def _end_if_told(self) -> None:
        """Ends a run that was told to stop; after all callbacks, so that a checkpoint has their state. Collective."""
        if preemption := preemption_of(self.trainer):
            preemption.end_if_told(self.trainer)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        describe(self, checkpoint)
        checkpoint[IDENTITIES_KEY] = saved_identities(self.identities) | self._passed_on
        checkpoint["state_dict"] = without_frozen(self, checkpoint["state_dict"])
        drop_frozen_current(self, checkpoint)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_description(self, checkpoint)
        saved = checkpoint.get(IDENTITIES_KEY, {})
        check_identities(saved, self.identities)
        choose_weights(self, checkpoint)
        self._passed_on = references(saved) if self.trainer.training else {}
        if self.trainer.training:
            tell_changes(checkpoint.get(SETTINGS_KEY, {}), self.told_settings())
        checkpoint["state_dict"] = with_frozen(self, checkpoint["state_dict"])

    def optimizer_config(self, role: ModelRole) -> dict[str, Any]:
        """Returns one entry of ``configure_optimizers``; `LearningRateMonitor` logs its rates below ``lr/<role>``."""
        optim = role.config.optim
        optimizer = self.contract.make_optimizer(getattr(self, role.name), optim)
        schedule = make_schedule(optimizer, optim, self.trainer.max_steps, f"{role.key}.optim")
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "name": f"lr/{role.name}", "interval": "step"},
        }
