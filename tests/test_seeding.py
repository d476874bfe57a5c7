"""Seeding again: the streams that it sets, and that it costs nothing worth a thought."""

from __future__ import annotations

import random
from unittest.mock import patch

import numpy as np
import torch

from verl_lightning.seeding import derive_seed, reseed


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_all_streams_begin_anew():
    """Torch's as after `torch.manual_seed`."""
    reseed(3, "train")
    first, second = draw(), draw()
    reseed(3, "train")
    assert draw() == first != second
    torch.manual_seed(derive_seed(3, "train"))
    assert float(torch.rand(())) == first[2]
    reseed(4, "train")
    assert all(new != old for new, old in zip(draw(), first, strict=True))


def test_devices_are_seeded_where_there_are_any():
    with (
        patch.object(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")),
        patch.object(torch.cuda, "manual_seed_all") as seed_all,
    ):
        reseed(3, "train")
    seed_all.assert_called_once_with(derive_seed(3, "train"))


def test_no_traceback_is_formatted():
    """As `torch.manual_seed` does for devices that are not there."""
    with patch("traceback.format_stack") as format_stack:
        reseed(3, "train")
    format_stack.assert_not_called()
