"""Options of learning from a teacher's distributions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from verl_lightning.functional.normalizer import Aggregation
from verl_lightning.models.config import ModelConfig
from verl_lightning.options import Options


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(Options, key="model.teacher"):
    """A model to whose distributions the policy is drawn, token by token."""

    path: str | None = None
    """Folder or hub name of the teacher; null for one at ``base_url``, or for the policy itself: as it is before each
    iteration's updates, with ``context``, or as it was, with ``update_every``."""

    by_source: dict[str, str] = field(default_factory=dict)
    """Paths of other teachers for the prompts of some data sources, such as ``{math: path/of/a/teacher}``. Other
    prompts learn from the teacher of ``path``, or from none."""

    base_url: str | None = None
    """Address of a vLLM server that answers as OpenAI's does, such as ``http://host:8000/v1``; the policy's tokens are
    sent as numbers, so its model must have the same tokenizer. Needs ``top_k``."""

    served_model: str | None = None
    """Name of the teacher at ``base_url``."""

    api_key: str | None = None
    """Name of the environment variable with the key of ``base_url``; null sends none."""

    max_concurrency: int = 32
    """Requests that each rank may have open at ``base_url``."""

    beta: float = 1.0
    """Divergence: 0 is the forward KL, 1 the reverse KL, and between them lies the generalised Jensen-Shannon
    divergence with this weight of the teacher in the mixture."""

    coef: float = 1.0
    """Weight of the divergence in the loss."""

    aggregation: Aggregation = "token-mean"
    """Aggregation of the tokens' divergences into one number, over the tokens of the whole optimizer step that have a
    teacher; its own beside that of the policy loss."""

    top_k: int | None = None
    """Compare the teacher's most probable tokens only, all others as one: a lower bound of the divergence. Null
    compares all tokens, and holds what the teacher's output head reads of each token."""

    context: str | None = None
    """Text that the teacher alone reads, at the end of the last message of the prompt. ``{column}`` stands for a column
    of the prompt's row, and ``{column[key]}`` for a part of it, such as ``The answer is
    {reward_model[ground_truth]}.``"""

    update_every: int | None = None
    """Iterations after which the teacher becomes the policy as it is then; it starts as the policy."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights of the teachers of ``path`` and ``by_source``."""

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ValueError(f"`model.teacher.beta` must lie in [0, 1], got {self.beta}.")
        if self.coef <= 0:
            raise ValueError(f"`model.teacher.coef` must be above 0, got {self.coef}.")
        for name in ("top_k", "update_every", "max_concurrency"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"`model.teacher.{name}` must be at least 1, got {value}.")
        self._check_places()

    def _check_places(self) -> None:
        named = {"path": self.path, "base_url": self.base_url, "update_every": self.update_every}
        given = [name for name, value in named.items() if value is not None]
        if len(given) > 1:
            raise ValueError(
                f"`model.teacher.{given[0]}` and `model.teacher.{given[1]}` both say who teaches. Leave one out."
            )
        if not given and self.context is None and not self.by_source:
            raise ValueError(
                "`model.teacher.path` is missing: the policy can't learn from itself. Set it, `model.teacher.base_url`,"
                " `model.teacher.update_every` or, for a teacher that knows more, `model.teacher.context`."
            )
        if self.base_url is None:
            for name in ("served_model", "api_key", "max_concurrency"):
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(f"`model.teacher.{name}` needs `model.teacher.base_url`. Leave it out.")
            return
        if self.by_source:
            raise ValueError("`model.teacher.by_source` names teachers on these machines: leave out `base_url`.")
        if self.top_k is None or self.served_model is None:
            missing = "top_k" if self.top_k is None else "served_model"
            raise ValueError(f"`model.teacher.base_url` needs `model.teacher.{missing}` too.")

    @property
    def is_policy(self) -> bool:
        """True if the teacher of most prompts is the policy itself, as it is."""
        return self.context is not None and self.path is None and self.base_url is None and self.update_every is None

    def models(self, policy: ModelConfig) -> dict[str, ModelConfig]:
        """Returns the settings of the models that teach and are not the policy, by the name of their role.

        Args:
            policy: Settings of the policy.
        """
        found = {} if self.path is None else {"teacher": self.path}
        found |= {f"teacher of {source}": path for source, path in self.by_source.items()}
        options = {"dtype": self.dtype, "attn_implementation": policy.attn_implementation, "packing": policy.packing}
        models = {name: ModelConfig(path=path, **options) for name, path in found.items()}  # type: ignore[arg-type]
        return models if self.update_every is None else {"teacher": policy} | models
