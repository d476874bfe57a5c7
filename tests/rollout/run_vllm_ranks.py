"""Trains for three steps with vLLM under one strategy and saves the metrics of each rank; Lightning starts the others.

``python tests/rollout/run_vllm_ranks.py --strategy ddp --devices 2 --folder model --prompts prompts.jsonl --out out``
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning.pytorch import seed_everything

from tests.runs import Recorder, make_ppo, make_prompts, make_trainer
from tests.strategies.same_data import SameDataStrategy
from verl_lightning.callbacks import VLLMRollout
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.strategies import STRATEGIES

KINDS = {**STRATEGIES, "same_data": SameDataStrategy}


def main() -> None:
    """Trains, and writes ``<out>/<rank>.json``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    arguments = parser.parse_args()
    seed_everything(0)
    recorder = Recorder()
    rollout = VLLMRollout(
        SamplingConfig(num_samples=4, max_new_tokens=6),
        enforce_eager=True,
        tensor_parallel_size=arguments.tensor_parallel_size,
    )
    strategy = KINDS[arguments.strategy]() if arguments.devices > 1 else "auto"
    options = {"strategy": strategy, "devices": arguments.devices}
    trainer = make_trainer(arguments.out, rollout, recorder, **options)
    trainer.fit(make_ppo(arguments.folder), datamodule=make_prompts(arguments.prompts))
    (arguments.out / f"{trainer.global_rank}.json").write_text(json.dumps(recorder.steps))


if __name__ == "__main__":
    main()
