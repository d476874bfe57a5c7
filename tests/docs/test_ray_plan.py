"""The numbers of the plan for 64 GPUs, computed anew from what the page says that they follow from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verl_lightning.modules.batch_plan import BatchPlan
from verl_lightning.modules.ppo_config import UpdateConfig

PAGE = (Path(__file__).parents[2] / "docs" / "ray.md").read_text(encoding="utf-8")
RANKS, PORT, FLOPS = 64, 50e9, 0.4 * 989e12
PARAMETERS, TOKENS = 7e9, 512 * 8 * (512 + 2048)
BUDGET = 16384
SHARE = (RANKS - 1) / RANKS


def table(heading: str) -> list[list[str]]:
    """Cells of the first table under a heading, without its first line."""
    lines = PAGE.partition(f"### {heading}\n")[2].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    rows = []
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def numbers(text: str, unit: str) -> list[float]:
    """Those before a unit."""
    return [float(number) for number in re.findall(rf"([\d.]+) {unit}\b", text)]


def test_memory_follows_from_the_parameters():
    rows = table("What fits on a card")

    assert [row[0] for row in rows] == ["0.5e9", "7e9", "32e9", "70e9"]
    for parameters, *cells in rows:
        gigabytes = float(parameters) / 1e9
        expected = [16 * gigabytes, 16 * gigabytes / 8, 16 * gigabytes / RANKS, 2 * gigabytes]
        assert [numbers(cell, "GB")[0] for cell in cells] == pytest.approx(expected, abs=0.051)


def test_the_batch_plan_is_that_of_the_package():
    update = UpdateConfig(mini_batch_size=128, max_tokens_per_micro_batch=BUDGET)
    plan = BatchPlan(prompts_per_step=512, num_samples=8, data_parallel_size=RANKS, update=update, max_tokens=2560)
    cells = " ".join(cell for row in table("Batch plan") for cell in row)
    per_pass = BUDGET // 2560

    assert plan.sequences_per_step * 2560 == TOKENS
    for claim in (
        f"{plan.sequences_per_step} sequences, at most {TOKENS / 1e6:.1f} million tokens",
        f"= {plan.sequences_per_step // RANKS}, at most {TOKENS / RANKS / 1e3:.0f} thousand tokens",
        f"{plan.optimizer_steps} optimizer steps; {plan.mini_batch_sequences_per_rank} sequences of a rank in each",
        f"at least {per_pass} sequences of 2560: {-(-plan.mini_batch_sequences_per_rank // per_pass)} micro-batches",
    ):
        assert claim in cells
    assert f"= {128 * 8 / per_pass:.0f} ranks" in PAGE


@pytest.mark.parametrize(
    ("row", "num_bytes"),
    [
        (0, 2 * 4 * PARAMETERS * SHARE),
        (1, 4 * PARAMETERS * SHARE),
        (2, 2 * PARAMETERS * SHARE),
        (3, 2 * PARAMETERS * SHARE),
        (4, 2 * PARAMETERS),
        (5, 20 * TOKENS),
    ],
)
def test_what_crosses_the_network(row, num_bytes):
    claim = table("What crosses the network")[row][2]

    assert numbers(claim, "GB")[0] == pytest.approx(num_bytes / 1e9, rel=0.06)
    for seconds in numbers(claim, "s"):
        assert seconds == pytest.approx(num_bytes / PORT, rel=0.06)


def test_times_and_limits():
    prose = " ".join(PAGE.split())
    gathers, micro_batch = 2 * 2 * PARAMETERS * SHARE / PORT, 6 * PARAMETERS * BUDGET / FLOPS
    token = 6 / FLOPS
    for claim in (
        f"takes {micro_batch:.1f} s at 40 %",
        f"The {gathers:.2f} s of its two gathers over 64 GPUs hide behind it, and so do the {2 * gathers:.1f} s",
        f"bytes a GPU and step, over the network: {2 * 4 * PARAMETERS / 8 / 1e9:.0f} GB",
        f"fewer than about {4 / PORT / token / 1e3:.0f} and {8 / PORT / token / 1e3:.0f} thousand tokens",
        f"2048 tokens at 20 ms are {2048 * 0.02:.0f} s",
        f"0.1 s are {4096 * 0.1:.0f} s of CPU: 64 workers take {4096 * 0.1 / 64:.0f} s",
        f"{12 * PARAMETERS / 1e9:.0f} GB for 7e9, {12 * PARAMETERS / 2e9:.0f} s to a shared disk of 2 GB/s",
        f"two minutes that is {100 * 12 * PARAMETERS / 2e9 / 1200:.1f} %",
    ):
        assert claim in prose


def test_colocated_and_split_steps():
    prose = " ".join(PAGE.split())
    together, half = (8 * PARAMETERS * TOKENS / FLOPS / ranks for ranks in (64, 32))

    assert f"take {together:.0f} s on 64 cards at 40 %, {half:.0f} s on 32" in prose
    assert (
        f"step is {together:.0f} s and the 41 s of the longest response, one after the other: {together + 41:.0f} s"
        in prose
    )
    assert f"the longer of {half:.0f} s and 41 s" in prose
