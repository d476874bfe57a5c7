from __future__ import annotations

from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from verl_lightning.rewards.wire import decode_samples, encode_samples


def test_plain_samples_come_through_unchanged(make_sample):
    sample = make_sample(
        "line\nbreak, \u2028, \ud800 and \u00e9\x00",
        ground_truth={"answers": ["72", 72, 7.5, None, True]},
        prompt=[{"role": "user", "content": "?"}],
        extra_info={"index": 3},
        is_truncated=True,
    )

    line = encode_samples([sample])

    assert decode_samples(line) == [sample]
    assert line.count(b"\n") == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(72), 72),
        (np.float32(1.5), 1.5),
        (np.bool_(True), True),
        (np.str_("72"), "72"),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array(["a", np.array([1.0])], dtype=object), ["a", [1.0]]),
        (np.datetime64("2024-02-01"), "2024-02-01"),
        (np.datetime64("2024-02-01T12:30:00.000000001"), "2024-02-01T12:30:00.000000001"),
        (np.array(["2024-02-01"], dtype="datetime64[s]"), ["2024-02-01T00:00:00"]),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), [1.0, 2.0]),
        (b"ab", "YWI="),
        (date(2024, 2, 1), "2024-02-01"),
        (datetime(2024, 2, 1, 12, 30), "2024-02-01T12:30:00"),
        (timedelta(minutes=1.5), 90.0),
        (Decimal("1.10"), "1.10"),
        ({3, 1, 2}, [1, 2, 3]),
        ((1, 2), [1, 2]),
    ],
)
def test_values_that_json_lacks_become_plain(make_sample, value, expected):
    (sample,) = decode_samples(encode_samples([make_sample(ground_truth=value, extra_info={"nested": [value]})]))

    assert sample.ground_truth == expected
    assert type(sample.ground_truth) is type(expected)
    assert sample.extra_info == {"nested": [expected]}


def test_other_values_are_refused_by_type(make_sample):
    with pytest.raises(TypeError, match="a `PosixPath` can't be written so. Convert it in the data set"):
        encode_samples([make_sample(extra_info={"file": Path("x")})])
