"""Two nodes on one machine: GRPO with trainers, reward functions and rollout engines spread over a Ray cluster.

    python examples/ray/run.py

starts a cluster of two local nodes, each of which has five CPUs as far as Ray knows, and runs on it::

    verl-fit ray --num-workers 2 --cpus-per-worker 3 --address ADDRESS --config examples/quickstart/grpo.yaml ...

One trainer lies on each node, beside the reward actors and the engines. On real machines `ray start` makes the cluster.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from ray.cluster_utils import Cluster

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "quickstart"
NODE = {"num_cpus": 5, "num_gpus": 0, "object_store_memory": 200 * 2**20}


def train(address: str, steps: int) -> None:
    """Builds the quick start's model and data, and trains on the cluster."""
    subprocess.run([sys.executable, QUICKSTART / "prepare.py", "--out", "runs/quickstart"], check=True)
    words = ["ray", "--num-workers", "2", "--cpus-per-worker", "3", "--address", address]
    words += ["--config", str(QUICKSTART / "grpo.yaml"), "--config", str(HERE / "ray.yaml"), "--strategy", "ddp"]
    words += ["--model.actor.path", "runs/quickstart/model", f"--trainer.max_steps={steps}"]
    words += [
        "--trainer.val_check_interval",
        str(steps),
        "--model.reward.function",
        f"{HERE / 'reward.py'}:right_places",
    ]
    command = [str(Path(sys.executable).with_name("verl-fit")), *words]
    print(f"\n$ {' '.join(command)}", flush=True)
    subprocess.run(command, check=True)


def main() -> None:
    """Makes the cluster, trains, and takes it down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="iterations (%(default)s)")
    steps = parser.parse_args().steps
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        cluster.add_node(**NODE, node_ip_address="127.0.0.2")  # else Ray Train takes both for one
        cluster.wait_for_nodes()
        train(cluster.address, steps)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
