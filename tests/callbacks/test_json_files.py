"""JSON that browsers and strict readers take."""

from __future__ import annotations

import json
import math

import pytest

from tests.runs import make_trainer
from verl_lightning.callbacks import FinalValidation
from verl_lightning.callbacks.json_files import to_json


def test_numbers_that_json_lacks_become_null():
    value = {"a": math.nan, "b": [math.inf, (1.5, -math.inf)], 3: {"c": None, "d": True, "e": "NaN", "f": 2}}

    plain = json.loads(to_json(value), parse_constant=pytest.fail)

    assert plain == {"a": None, "b": [None, [1.5, None]], "3": {"c": None, "d": True, "e": "NaN", "f": 2}}


def test_a_final_validation_without_a_number_can_be_read(tmp_path):
    callback = FinalValidation(str(tmp_path))
    callback._path, callback._metrics = tmp_path, {"val/reward": math.nan}
    callback.on_fit_end(make_trainer(tmp_path), None)

    kept = json.loads((tmp_path / "final_validation.json").read_text(), parse_constant=pytest.fail)
    assert kept["metrics"] == {"val/reward": None}
