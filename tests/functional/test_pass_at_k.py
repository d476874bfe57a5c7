"""Pass@k counts subsets."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from verl_lightning.functional.pass_at_k import pass_at_k


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(k):
    num_correct = torch.tensor([0, 1, 2, 4, 5])
    subsets = list(itertools.combinations(range(5), k))
    expected = [sum(min(subset) < c for subset in subsets) / len(subsets) for c in num_correct.tolist()]

    assert_close(pass_at_k(num_correct, torch.full((5,), 5), k=k), torch.tensor(expected))


def test_pass_at_k_takes_a_number_of_samples_for_each_prompt():
    assert_close(pass_at_k(torch.tensor([1, 1]), torch.tensor([2, 4]), k=2), torch.tensor([1.0, 0.5]))


def test_pass_at_k_needs_k_samples():
    with pytest.raises(ValueError, match="at least `k` = 4 samples of each prompt, got 3"):
        pass_at_k(torch.tensor([1]), torch.tensor([3]), k=4)
