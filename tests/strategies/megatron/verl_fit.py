"""``verl-fit`` in which Megatron runs on CPUs.

``python tests/strategies/megatron/verl_fit.py --strategy megatron --config ...``, from the root of the repository.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.strategies.megatron.cpu import pretend_cuda
from verl_lightning.cli import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    pretend_cuda()
    main()
