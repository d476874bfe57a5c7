"""Micro-batches hold every row once and no column that none of their rows needs."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from verl_lightning.modules.micro_batches import join_columns, split_micro_batches
from verl_lightning.types import Experience, TokenBatch

PROMPTS, RESPONSES = (2, 4, 1, 3, 2), (3, 1, 5, 2, 2)


def make_experience():
    """Five rows with left-padded prompts and right-padded responses; tokens are numbered."""
    prompt = torch.arange(4) >= 4 - torch.tensor(PROMPTS)[:, None]
    response = torch.arange(6) < torch.tensor(RESPONSES)[:, None]
    ids = torch.arange(50).view(5, 10)
    scores = torch.arange(30.0).view(5, 6)
    return Experience(
        input_ids=ids,
        attention_mask=torch.cat([prompt, response], 1),
        response_mask=response,
        rollout_log_probs=scores,
        old_log_probs=scores + 100,
        advantages=scores + 200,
        temperature=0.7,
    )


def test_every_row_comes_once_in_order():
    batch = make_experience()
    parts = split_micro_batches(batch, 2)

    assert [len(part) for part in parts] == [2, 2, 1]
    row = 0
    for part in parts:
        assert part.temperature == 0.7
        for index in range(len(part)):
            assert_close(
                part.input_ids[index][part.attention_mask[index]], batch.input_ids[row][batch.attention_mask[row]]
            )
            assert_close(
                part.advantages[index][part.response_mask[index]], batch.advantages[row][batch.response_mask[row]]
            )
            row += 1


def test_columns_are_cut_to_the_longest_prompt_and_response():
    widths = [
        (part.input_ids.shape[1], part.response_mask.shape[1]) for part in split_micro_batches(make_experience(), 2)
    ]
    assert widths == [(4 + 3, 3), (3 + 5, 5), (2 + 2, 2)]


def test_masked_tokens_inside_a_response_are_kept():
    """Tool output is not trained on, but what follows depends on it."""
    batch = make_experience()
    batch.response_mask[2, 1:4] = False
    (part,) = split_micro_batches(batch.select(slice(2, 3)), 1)
    assert part.response_mask.tolist() == [[True, False, False, False, True]]
    assert part.attention_mask.all()


def test_a_row_with_an_empty_response_keeps_one_column():
    batch = make_experience()
    batch.response_mask[:] = False
    batch.attention_mask[:, 4:] = False
    (part,) = split_micro_batches(batch, 5)
    assert part.response_mask.shape == (5, 1)


def test_chats_are_cut_at_the_right():
    """In SFT the response is all but the first column."""
    mask = torch.arange(8) < torch.tensor([[5], [3]])
    batch = TokenBatch(input_ids=torch.arange(16).view(2, 8), attention_mask=mask, response_mask=mask[:, 1:])
    first, second = split_micro_batches(batch, 1)
    assert_close(first.input_ids, torch.arange(5)[None])
    assert_close(second.input_ids, torch.arange(8, 11)[None])


def test_scores_are_joined_to_the_full_width():
    parts = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]])]
    assert_close(join_columns(parts, 3), torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0], [4.0, 0.0, 0.0]]))


def test_the_batch_is_not_written_to():
    batch, copy = make_experience(), make_experience()
    for part in split_micro_batches(batch, 2):
        part.input_ids.clone().zero_()
    assert_close(batch.input_ids, copy.input_ids)
    assert batch.response_mask.shape == copy.response_mask.shape
