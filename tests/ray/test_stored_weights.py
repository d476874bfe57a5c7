"""Weights in Ray's object store are those that were put there, of every type and shape, and are not copied."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.testing import assert_close

from verl_lightning.rollout.stored_weights import as_bytes, as_weights

WEIGHTS = {
    "matrix": torch.arange(6.0).view(2, 3),
    "turned": torch.arange(6.0).view(2, 3).T,
    "half": torch.randn(4, 2).bfloat16(),
    "scalar": torch.tensor(7),
}


@pytest.mark.filterwarnings("error")
def test_weights_come_out_as_they_went_in():
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(as_bytes(WEIGHTS), protocol=5, buffer_callback=buffers.append)  # as Ray does
    stored = pickle.loads(message, buffers=[bytes(each) for each in buffers])  # which can't be written to
    assert_close(dict(as_weights(stored)), WEIGHTS, rtol=0, atol=0)


def test_they_are_views_of_what_lies_there():
    stored = as_bytes(WEIGHTS)
    assert {name: weight.data_ptr() for name, weight in as_weights(stored)} == {
        name: array.ctypes.data for name, (_, _, array) in stored.items()
    }
