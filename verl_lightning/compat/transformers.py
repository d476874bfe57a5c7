"""Names of transformers 5.16 to 5.19 that are private, or that it does not export."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin


def attention_of(backbone: PreTrainedModel) -> str | None:
    """Name of the attention kernel that a model uses for tokens, which only a private attribute of its config tells."""
    name: str | None = backbone.config.get_text_config()._attn_implementation
    return name


def has_state(backbone: PreTrainedModel) -> bool:
    """Tell whether a model class says that its layers carry a state from token to token."""
    return bool(getattr(backbone, "_is_stateful", False))


def goes_through_attention_interface(backbone: PreTrainedModel) -> bool:
    """Tell whether a model class says that it gets its attention kernel from `AttentionInterface`."""
    return bool(getattr(backbone, "_supports_attention_backend", False))


def takes_other_kernels(config: PreTrainedConfig) -> bool:
    """Tell whether the model of a config computes plain attention, through `AttentionInterface`; by what it says."""
    model = causal_model_class(config)
    return bool(getattr(model, "_supports_attention_backend", False) and getattr(model, "_supports_sdpa", False))


def causal_model_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Class of the causal language model of a config, with or without a vision tower; None if transformers has none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    mapping = (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if reads_images_only_as_whole(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    )
    return cast("type[PreTrainedModel] | None", mapping.get(type(config), None))


def reads_images_only_as_whole(config: PreTrainedConfig) -> bool:
    """Tell whether transformers has the language model of a config only as a part of one that reads images too."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    kind = type(config)
    return kind not in MODEL_FOR_CAUSAL_LM_MAPPING and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def block_names(backbone: PreTrainedModel) -> set[str]:
    """Names of the classes of a model's blocks, as it says them for those who spread it over devices."""
    return set(backbone._no_split_modules or ())


def convert_weights(skeleton: PreTrainedModel, stored: dict[str, Any]) -> Any:
    """Put what files hold into a model's weights, as `from_pretrained` does it, which takes whole files only.

    `test_files_are_read_as_from_pretrained_reads_them` shows that it does the same.

    Args:
        skeleton: The model on the meta device, whose weights get memory as far as the files hold them.
        stored: Tensors by the files' names, or slices of them to be read.

    Returns:
        What transformers tells of mismatched and failed weights.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    mapping: list[Any] = list(get_model_conversion_mapping(skeleton))
    options = LoadStateDictConfig(dtype=skeleton.dtype, weight_mapping=mapping)
    told, _ = convert_and_load_state_dict_in_model(skeleton, stored, options)
    return told


def weights_as_stored(backbone: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model's weights under the names that files have, as `save_pretrained` writes them."""
    from transformers.core_model_loading import revert_weight_conversion

    stored: dict[str, Tensor] = revert_weight_conversion(backbone, weights)
    return stored


def asks_for_code(error: ValueError) -> bool:
    """Tell whether transformers needs code of a repository, by its words: it has no type for that."""
    return "trust_remote_code" in str(error)


def top_k_routers(model: nn.Module) -> list[Any]:
    """Routers of a mixture of experts in the order of its layers, by the name that their classes have.

    It is the same in transformers and in Megatron-Core. Each has ``weight`` (one row for each expert) and calls
    ``topk`` on the scores of all experts.
    """
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def top_k_of(router: Any) -> int:
    """Number of experts that a router chooses for a token."""
    return int(router.top_k if hasattr(router, "top_k") else router.topk)  # transformers', Megatron's


def read_image_processor(path: str, config: PreTrainedConfig) -> ProcessorMixin:
    """Read a model's processor; where torchvision is missing, which it wants for videos alone, one without videos.

    Args:
        path: Folder or hub name.
        config: Config of the model.
    """
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.utils.import_utils import is_torchvision_available

    processors: Any = AutoProcessor
    images: Any = AutoImageProcessor
    kind: Any = PROCESSOR_MAPPING.get(type(config), None)
    options = {} if kind is None else dict(inspect.signature(kind.__init__).parameters)
    if is_torchvision_available() or "video_processor" not in options:
        whole: ProcessorMixin = processors.from_pretrained(path, trust_remote_code=False)
        return whole

    def check(self: Any, name: str, argument: Any) -> Any:
        return None if name == "video_processor" else kind.check_argument_for_proper_class(self, name, argument)

    stored, _ = kind.get_processor_dict(path)
    made: ProcessorMixin = type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})(
        image_processor=images.from_pretrained(path, trust_remote_code=False),
        tokenizer=AutoTokenizer.from_pretrained(path, trust_remote_code=False),
        video_processor=None,
        **{name: value for name, value in stored.items() if name in options and not name.endswith("processor")},
    )
    return made
