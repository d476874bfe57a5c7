from __future__ import annotations

import re

import pytest

from verl_lightning.rewards.loading import BUILT_IN_REWARDS, load_reward_function

GOOD = "def f(sample, *, scale=1.0):\n    return scale\n"


@pytest.mark.parametrize("name", BUILT_IN_REWARDS)
def test_built_ins_load(name):
    function = load_reward_function(name, {})
    assert (function.is_batched, function.is_async) == (False, False)


@pytest.mark.parametrize(
    ("source", "name", "arguments", "message"),
    [
        (GOOD, "gsm8", {}, "`function: gsm8` is unknown. Did you mean `gsm8k`? Give a built-in name (boxed_format,"),
        (GOOD, "absent.module.f", {}, "does not import: ModuleNotFoundError: No module named 'absent'. Give a"),
        (GOOD, "json.dump_", {}, "has no `dump_`. Did you mean `dump`? Give"),
        (GOOD, "absent.py:f", {}, "does not import: FileNotFoundError: no file `absent.py`. Give"),
        (GOOD, "reward.py:g", {}, "reward.py` has no `g`."),
        ("1 / 0", "reward.py:f", {}, "does not import: ZeroDivisionError: division by zero. Give"),
        ("exit(1)", "reward.py:f", {}, "does not import: SystemExit: 1. Give"),
        ("f = 1", "reward.py:f", {}, "must be a function, plain or `async`, got 1."),
        ("class f: pass", "reward.py:f", {}, "must be a function, plain or `async`, got <class"),
        ("async def f(sample): yield 1.0", "reward.py:f", {}, "must be a function, plain or `async`, got <function"),
        (GOOD, "reward.py:f", {"scal": 2}, "takes no argument `scal`. Did you mean `scale`? Its arguments are: scale."),
        (GOOD, "gsm8k", {"mode": 2}, "`function: gsm8k` takes no argument `mode`. Its arguments are: none."),
        ("def f(sample, scale): pass", "reward.py:f", {}, "(none): missing a required argument: 'scale'. Its"),
        ("def f(): pass", "reward.py:f", {}, "too many positional arguments. Its signature is `()`. It must take one"),
        ("def f(prompt, response): pass", "reward.py:f", {}, "'response'. Its signature is `(prompt, response)`. It"),
        ("f = max", "reward.py:f", {}, "does not say what it takes (no signature found for builtin"),
    ],
)
def test_bad_functions_are_refused_with_the_way_out(tmp_path, monkeypatch, source, name, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(source)

    with pytest.raises(ValueError, match=re.escape(message)):
        load_reward_function(name, arguments)


def test_arguments_are_bound(tmp_path, make_sample):
    (tmp_path / "reward.py").write_text(GOOD)

    assert load_reward_function(f"{tmp_path}/reward.py:f", {"scale": 2.5}).judge([make_sample()]) == [2.5]


def test_a_file_can_import_its_neighbours(tmp_path, monkeypatch, make_sample):
    monkeypatch.setattr("sys.path", ["/nowhere"])
    (tmp_path / "neighbour_of_reward.py").write_text("ANSWER = 0.5")
    (tmp_path / "reward.py").write_text("from neighbour_of_reward import ANSWER\ndef f(sample): return ANSWER")

    assert load_reward_function(f"{tmp_path}/reward.py:f", {}).judge([make_sample()]) == [0.5]
