"""Answers of a policy outside of training, such as in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_lightning.data.own_rows import prompt_batch
from verl_lightning.models.scorer import TokenScorer
from verl_lightning.rollout.base import Request, SamplingConfig
from verl_lightning.rollout.completions import answer, wait_for
from verl_lightning.rollout.hf import HFEngine
from verl_lightning.types import PromptImages

if TYPE_CHECKING:
    from verl_lightning.modules.base import PostTrainingModule


def generate(
    module: PostTrainingModule, messages: str | Sequence[Mapping[str, Any]], sampling: SamplingConfig, seed: int
) -> str:
    """Answers a conversation with a copy of the module's policy as it is now. Collective where it is sharded.

    Args:
        module: Module before, in or after training; before, the policy is the model at its path.
        messages: Conversation, or what the user says.
        sampling: Settings of the sampling.
        seed: Seed of the response, unless it is greedy.
    """
    said: list[Any] = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    tokenizer = module.tokenizer
    images: PromptImages | None = None
    if module.processor is not None and any(isinstance(message.get("content"), list) for message in said):
        batch = prompt_batch([{"prompt": said}], tokenizer, needs_truth=False, processor=module.processor)
        (ids,), (images,) = batch.prompts(), batch.images or [None]
    else:
        text = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    engine = HFEngine(
        module.policy_config, eos_token_ids=module.eos_token_ids, pad_token_id=tokenizer.pad_token_id, batch_size=1
    )
    engine.start(module.device)
    try:
        if any(isinstance(child, TokenScorer) for child in module.children()):
            engine.load_weights(module.contract.named_weights(module.policy, None), 0)
        requests = [Request(prompt_ids=ids, sampling=sampling, seed=seed, name="the conversation", images=images)]
        (completion,) = wait_for(answer(engine.generate, requests))
    finally:
        engine.stop()
    return str(tokenizer.decode(completion.token_ids, skip_special_tokens=True))
