"""Dataclasses that cross room borders: prompts, what a model scores, what an engine samples, what PPO learns from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from typing_extensions import override

from verl_lightning.episodes import Episode


class RowLength(NamedTuple):
    """Lengths of a row, in tokens."""

    tokens: int
    """Real tokens, without padding."""

    scored: int
    """Response tokens that are trained on."""

    prompt: int
    """Columns from the prompt's first real token on."""

    response: int
    """Columns up to the response's last real token."""


# Not frozen, since Lightning's half-precision plugins change what batches hold.
@dataclass(kw_only=True)
class ImageInputs:
    """The images of one sequence, or those of several in a row, as their model reads them."""

    pixel_values: Float[Tensor, "units ..."]
    """Patches, tiles or whole images, as the model's image processor cuts them, of all images in their order."""

    image_grid_thw: Int[Tensor, "images 3"] | None = None
    """Frames, rows and columns of each image's patches; None for models whose images all have one size."""

    pixel_attention_mask: Shaped[Tensor, "units ..."] | None = None
    """True on pixels that are no padding; None for models that pad none."""

    def to(self, device: torch.device) -> Self:
        """The same images on another device."""
        values = vars(self).items()
        return dataclasses.replace(
            self, **{name: send(value, device) for name, value in values if isinstance(value, Tensor)}
        )

    @classmethod
    def join(cls, parts: Sequence[ImageInputs]) -> ImageInputs:
        """The images of several sequences, one sequence after another; at least one."""
        columns = {field.name: [getattr(part, field.name) for part in parts] for field in dataclasses.fields(cls)}
        joined: dict[str, Any] = {name: torch.cat(found) for name, found in columns.items() if found[0] is not None}
        return cls(**joined)


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Token sequences for a model to score: a left-padded prompt, then a right-padded response.

    The response is the last ``response_mask.shape[1]`` columns of ``input_ids``; for SFT, all but the first column.
    """

    input_ids: Int[Tensor, "batch sequence"]
    """Prompt and response tokens."""

    attention_mask: Bool[Tensor, "batch sequence"]
    """True on real tokens, False on padding."""

    response_mask: Bool[Tensor, "batch response"]
    """True on the response tokens that are trained on; False on tool output and padding."""

    temperature: float = 1.0
    """Softmax temperature of every log-probability of these tokens, dimensionless."""

    row_lengths: tuple[RowLength, ...] | None = None
    """Lengths of each row, for code that can't wait for the device to count; None where the host does not know them."""

    rows_per_example: int = 1
    """Rows, one after another, that a loss compares: micro-batches never part them."""

    rows_vary: bool = False
    """True if ranks may have different numbers of rows, as where episodes are several trajectories."""

    experts: Int[Tensor, "batch sequence layers chosen"] | None = None
    """Experts of a mixture that each token goes to again, -1 where its router chooses; None replays nothing."""
    teacher_index: Int[Tensor, " batch"] | None = None
    """Teacher of each sequence; -1 for none. None where nothing is distilled."""

    teacher_hidden: Float[Tensor, "batch response hidden"] | None = None
    """What the teacher's output head reads for each response token; None where its most probable tokens are given."""

    teacher_top_ids: Int[Tensor, "batch response listed"] | None = None
    """The teacher's most probable tokens in the place of each response token."""

    teacher_top_log_probs: Float[Tensor, "batch response listed"] | None = None
    """Log-probs of ``teacher_top_ids`` at ``temperature``, in nats; ``-inf`` fills up shorter lists."""

    images: tuple[ImageInputs | None, ...] | None = None
    """Images of each row, None for a row of text alone; None where no row has any."""

    mm_token_type_ids: Int[Tensor, "batch sequence"] | None = None
    """1 on the tokens that stand for images, 0 on text and padding; None where no row has images."""

    @property
    def counts(self) -> Bool[Tensor, " examples"]:
        """True for examples that are learnt from: not those that only fill up a batch."""
        return self.response_mask.any(-1).view(-1, self.rows_per_example).all(-1)

    @property
    def taught_mask(self) -> Bool[Tensor, "batch response"]:
        """True on the tokens that are trained on and have a teacher."""
        if self.teacher_index is None:
            return torch.zeros_like(self.response_mask)
        return self.response_mask & (self.teacher_index >= 0).unsqueeze(-1)

    @property
    def response_ids(self) -> Int[Tensor, "batch response"]:
        """The response columns of ``input_ids``."""
        return self.input_ids[:, -self.response_mask.shape[1] :]

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.input_ids)

    def select(self, rows: Int[Tensor, " rows"] | slice) -> Self:
        """The same batch with only these rows."""
        lengths = self.row_lengths[rows] if isinstance(rows, slice) and self.row_lengths is not None else None
        images = self.images
        if images is not None:
            images = images[rows] if isinstance(rows, slice) else tuple(images[row] for row in rows.tolist())
        return dataclasses.replace(self._map_tensors(lambda tensor: tensor[rows]), row_lengths=lengths, images=images)

    def known_lengths(self) -> tuple[RowLength, ...]:
        """Returns the lengths of each row; counts them if need be, which waits for the device."""
        (counted,) = with_lengths([self])
        assert counted.row_lengths is not None
        return counted.row_lengths

    def count(self) -> Int[Tensor, "batch 4"]:
        """The `RowLength` of each row, on the device."""
        is_real, prompt_width = self.attention_mask, self.input_ids.shape[1] - self.response_mask.shape[1]
        prompt, response = _last_true(is_real[:, :prompt_width].flip(-1)), _last_true(is_real[:, prompt_width:])
        return torch.stack([is_real.sum(-1), self.response_mask.sum(-1), prompt, response], dim=1)

    def to(self, device: torch.device) -> Self:
        """The same batch on another device."""
        moved = self._map_tensors(lambda tensor: send(tensor, device))
        if self.images is None:
            return moved
        # Samples of a prompt share its images.
        each = {id(images): images.to(device) for images in self.images if images is not None}
        return dataclasses.replace(moved, images=tuple(each.get(id(images)) for images in self.images))

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changed: dict[str, Any] = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **changed)


BatchT = TypeVar("BatchT", bound=TokenBatch)


def with_lengths(batches: Sequence[BatchT]) -> list[BatchT]:
    """Batches whose row lengths the host knows. Waits for the device once if it must count."""
    unknown = [batch for batch in batches if batch.row_lengths is None]
    if not unknown:
        return list(batches)
    rows = iter(torch.cat([batch.count() for batch in unknown]).tolist())
    counted = [tuple(RowLength(*next(rows)) for _ in range(len(batch))) for batch in unknown]
    lengths = iter(counted)
    return [
        batch if batch.row_lengths is not None else dataclasses.replace(batch, row_lengths=next(lengths))
        for batch in batches
    ]


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device, without holding up the host until that device has done all its work."""
    # A copy to a GPU holds up the host unless it is from pinned memory.
    is_upload = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if is_upload else tensor).to(device, non_blocking=True)


def _last_true(mask: Bool[Tensor, "rows columns"]) -> Int[Tensor, " rows"]:
    """Counts the columns up to each row's last True, which is included; 0 for a row without one."""
    if mask.shape[1] == 0:
        return mask.sum(-1)
    return torch.where(mask, torch.arange(1, mask.shape[1] + 1, device=mask.device), 0).amax(-1)


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch(TokenBatch):
    """Examples of two sequences each, one after the other.

    They are a prompt with its chosen and with its rejected response, or, where responses have labels, a prompt with its
    own response and with that to another prompt.
    """

    rows_per_example: int = 2
    """Rows, one after another, that a loss compares."""

    ref_log_probs: Float[Tensor, " batch"] | None = None
    """Log-probability of each response under the frozen reference, in nats; None where no reference is used."""

    is_desirable: Bool[Tensor, " batch"] | None = None
    """True on responses that are wanted; None for pairs."""

    margins: Float[Tensor, " batch"] | None = None
    """Difference of rewards that a pair should have at least, in each of its rows; None where the data has none."""

    kl: Float[Tensor, " batch"] | None = None
    """KL of policy and reference over the whole batch, in nats, the same in each row; None for pairs."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of a model for each response token; None for those of heads that it lacks."""

    log_probs: Float[Tensor, "batch response"] | None = None
    """Log-probabilities of the response tokens at the batch's temperature, in nats, float32."""

    entropy: Float[Tensor, "batch response"] | None = None
    """Entropy of the distribution that each response token was drawn from, in nats, float32."""

    sum_squared_probs: Float[Tensor, "batch response"] | None = None
    """``sum(p**2)`` over the vocabulary of that distribution, float32."""

    values: Float[Tensor, "batch response"] | None = None
    """Expected return before each response token, in units of reward, float32."""

    experts: Int[Tensor, "batch sequence layers chosen"] | None = None
    """Experts that each token of the sequences went to, -1 on padding; None if they were not recorded."""
    divergence: Float[Tensor, "batch response"] | None = None
    """Divergence from the teacher's distribution of each response token, in nats, float32; 0 without a teacher."""

    hidden: Float[Tensor, "batch response hidden"] | None = None
    """What the output head reads for each response token, of models that are teachers."""

    top_ids: Int[Tensor, "batch response listed"] | None = None
    """The most probable tokens in the place of each response token, of models that are teachers."""

    top_log_probs: Float[Tensor, "batch response listed"] | None = None
    """Log-probs of ``top_ids``, in nats."""


@dataclass(frozen=True, kw_only=True)
class Rollout(TokenBatch):
    """Sampled responses; ``num_samples`` rows in a row belong to one prompt."""

    rollout_log_probs: Float[Tensor, "batch response"]
    """Log-probabilities of the sampled tokens under the engine's policy at ``temperature``, in nats; 0 where masked."""

    is_truncated: Bool[Tensor, " batch"]
    """True where the response met the length limit before its end token."""

    prompt_index: Int[Tensor, " batch"]
    """Row of the prompt batch that each response answers; equal for the samples of one group."""

    episodes: tuple[Episode, ...] | None = None
    """Walk of each response through its environment, of which the row is the last trajectory; None for responses to
    nothing but a prompt."""

    @override
    def select(self, rows: Int[Tensor, " rows"] | slice) -> Self:
        chosen = super().select(rows)
        if self.episodes is None:
            return chosen
        indices = range(len(self))[rows] if isinstance(rows, slice) else rows.tolist()
        return dataclasses.replace(chosen, episodes=tuple(self.episodes[index] for index in indices))


@dataclass(kw_only=True)
class PromptImages:
    """The images of a prompt, for engines of either kind: those that are given pixels and those that read files."""

    inputs: ImageInputs
    """The images as the model reads them."""

    mm_token_type_ids: list[int]
    """1 on the prompt's tokens that stand for images, 0 on text."""

    files: list[bytes]
    """The images' files."""

    short_ids: list[int]
    """The prompt with one placeholder for each image, for engines that write it out by themselves."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, for a checkpoint or another process."""
        files = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in self.files]
        return vars(self) | {"inputs": dict(vars(self.inputs)), "files": files}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> PromptImages:
        """Restores the images that a `state_dict` was taken from."""
        files = [file.numpy().tobytes() for file in state["files"]]
        return cls(**state | {"inputs": ImageInputs(**state["inputs"]), "files": files})


@dataclass(kw_only=True)
class PromptBatch:
    """A batch of prompts; a rollout callback adds ``rollout`` to it."""

    prompt_ids: Int[Tensor, "batch prompt"]
    """Tokens of each prompt, padded on the left, up to the header of the assistant's turn."""

    prompt_mask: Bool[Tensor, "batch prompt"]
    """True on tokens, False on padding."""

    row_index: Int[Tensor, " batch"]
    """Position of each row in the data files, whatever was dropped before it."""

    is_duplicate: Bool[Tensor, " batch"]
    """True on rows that only fill up the last validation batches of the ranks; they must not count."""

    rows: list[dict[str, Any]]
    """All columns of each row: ``data_source``, ``prompt``, ``reward_model``, and whatever else its file has."""

    images: list[PromptImages | None] | None = None
    """Images of each prompt, None for one of text alone; None where no prompt has any."""

    rollout: Rollout | None = None
    """Responses to the prompts; None until the rollout callback has sampled them."""

    greedy_rollout: Rollout | None = None
    """One greedy response to each prompt, where advantages compare with it."""

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.rows)

    def prompts(self) -> list[list[int]]:
        """Return each prompt's tokens, without padding."""
        return [ids[mask].tolist() for ids, mask in zip(self.prompt_ids.cpu(), self.prompt_mask.cpu(), strict=True)]

    def to(self, device: torch.device) -> PromptBatch:
        """Return the batch on another device, as Lightning asks of a batch."""
        moved: dict[str, Any] = {
            name: send(value, device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True, kw_only=True)
class Experience(TokenBatch):
    """Experience that PPO learns from: a rollout with its advantages."""

    rollout_log_probs: Float[Tensor, "batch response"]
    """Log-probabilities of the response tokens under the engine's policy, in nats."""

    old_log_probs: Float[Tensor, "batch response"]
    """Log-probabilities of the same tokens under the policy before this iteration's first update, in nats."""

    advantages: Float[Tensor, "batch response"]
    """Advantage of each token over what was expected, in units of reward; constant."""

    loss_weights: Float[Tensor, "batch response"] | None = None
    """Importance weights of the policy loss, dimensionless, constant; None weighs all alike."""

    ref_log_probs: Float[Tensor, "batch response"] | None = None
    """Log-probabilities of the same tokens under the frozen reference, in nats; None when no KL is used."""

    values: Float[Tensor, "batch response"] | None = None
    """The critic's values before this iteration's first update; None without a critic."""

    returns: Float[Tensor, "batch response"] | None = None
    """Targets of the critic's values, in units of reward; None without a critic."""

    episode_index: tuple[int, ...] | None = None
    """Response of the rollout that each row is a trajectory of, in rising order; None in a part of an experience."""

    episode_tokens: Int[Tensor, " batch"] | None = None
    """Trained tokens of an optimizer step in all trajectories of each row's episode; None where each row is its own."""
