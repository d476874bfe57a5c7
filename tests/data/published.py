"""Chat templates that others published, read from the installed TRL, and small ones of further kinds."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TWIN = "_training"  # ends the name of a template that TRL marked with `{% generation %}`

_SPECIAL = re.compile(
    r"<[|｜][^<>\s'\"{}]+[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|</?s>|\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS)\]|\]~b\]|\[e~\["
    r"|<(?:start|end)_of_(?:turn|utterance)>|</?(?:think|tool_call|tool_response)>"
)
_EOS = {
    "deepseek": "<｜end▁of▁sentence｜>", "llava": "</s>", "mistral": "</s>", "phi3": "<|endoftext|>",
    "qwen": "<|im_end|>", "minimax": "[e~[",
}  # fmt: skip

# What families write that TRL has no template of: in the layout of their own templates, as far as matters here.
OWN = {
    "kimi_like": (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_assistant|>{% elif m.role == 'user' %}<|im_user|>"
        "{% else %}<|im_system|>{% endif %}{{ m.role }}<|im_middle|>"
        "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content or '' }}"
        "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>"
        "{{ c.id }} {{ c.function.name }}<|tool_call_argument_begin|>"
        "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
        "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
        "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
        "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
    ),
    "minimax_like": (
        "{% for m in messages %}]~b]{{ 'ai' if m.role == 'assistant' else m.role }}\n"
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}\n<invoke name=\"{{ c.function.name }}\">"
        "{% for k, v in c.function.arguments.items() %}<parameter name=\"{{ k }}\">"
        "{{ v if v is string else v | tojson }}</parameter>{% endfor %}</invoke>{% endfor %}[e~[\n{% endfor %}"
        "{% if add_generation_prompt %}]~b]ai\n{% endif %}"
    ),
    "mistral_like": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
        "{% if loop.last and tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "[INST] {{ m.content }}[/INST]{% elif m.role == 'assistant' and m.tool_calls %}[TOOL_CALLS] ["
        "{% for c in m.tool_calls %}{\"name\": \"{{ c.function.name }}\", \"arguments\": "
        "{{ c.function.arguments | tojson }}, \"id\": \"{{ c.id }}\"}{{ '' if loop.last else ', ' }}{% endfor %}]</s>"
        "{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>{% elif m.role == 'tool' %}[TOOL_RESULTS] "
        "{\"content\": {{ m.content }}}[/TOOL_RESULTS]{% else %}"
        "{{ raise_exception('Only user, assistant and tool roles are supported') }}{% endif %}{% endfor %}"
    ),
    "phi4_like": (
        "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
    ),
    "qwen_coder_like": (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
        "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n"
        "{{ v | tojson if v is mapping else v | string }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}  # fmt: skip


@cache
def published() -> dict[str, str]:
    """Templates by name; nothing of TRL is imported."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None, "TRL is not installed: pip install -e .[dev]"  # noqa: PT018
    files = sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja"))
    return {**{file.stem: file.read_text(encoding="utf-8") for file in files}, **OWN}


def originals() -> list[str]:
    """Names of templates as their models have them."""
    return [name for name in published() if not name.endswith(TWIN)]


def tokenizer_for(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and of the special tokens that a template writes."""
    template = published()[name]
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokens = Tokenizer(models.BPE(alphabet, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    eos = next((token for family, token in _EOS.items() if name.startswith(family)), "<eos>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token=eos, bos_token="<bos>", pad_token="<pad>", chat_template=template
    )
    special = sorted({*_SPECIAL.findall(template), *_SPECIAL.findall(template.replace("~ ", ""))})
    tokenizer.add_tokens([AddedToken(token, special=True) for token in special], special_tokens=True)
    return tokenizer
