"""``verl-fit kubernetes``: a manifest for KubeRay, whose `RayJob` makes a cluster, runs in it, and takes it away."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml  # type: ignore[import-untyped]

from verl_lightning.cli.arguments import find_config, shipped_configs
from verl_lightning.launch.options import parse_launch, split_words
from verl_lightning.needs import NOT_INSTALLED, installed_version
from verl_lightning.submit.run import Run, check_ray_fits, read_run

DESCRIPTION = """\
Writes a manifest for KubeRay; `kubectl apply` submits it. What follows Kubernetes' own options is the usual command
line of verl-fit, or `ray` and its options where not one process is to run on each GPU; see verl-fit --help.

The manifest has a ConfigMap with the configurations that are files here, and a RayJob. All paths of the settings lie in
the volume of --claim, which all pods mount. A run that fails or is told to stop is started again, in a cluster of its
own, and goes on with its last checkpoint, in the folder of its name.
"""

CONFIGS = "/etc/verl-fit"
"""Folder of the configurations in each pod."""

OBJECT_NAME = re.compile(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?")
"""Pattern of a RayJob's name: KubeRay makes longer ones of it, for which Kubernetes allows 63 characters."""

MARGIN = 60
"""Seconds that a process may take to end after its grace."""


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """Options of a manifest for KubeRay: its image, pods and volume."""

    image: str
    """Image with this package, Ray, and what the settings need."""

    claim: str
    """Name of the claim for a volume that many pods write to; data, models and runs lie there."""

    cpus_per_node: int
    """CPUs of a pod that trains."""

    nodes: int = 1
    """Pods that train; one more holds Ray's head."""

    gpus_per_node: int = 0
    """GPUs of such a pod, each with a process; 0 for none."""

    memory: str = "64Gi"
    """Memory of such a pod, as Kubernetes writes it."""

    mount: str = "/shared"
    """Folder of the volume in each pod, from which relative paths are looked for."""

    name: str | None = None
    """Name of the job and of the run's folder; None takes the configuration's and the time."""

    namespace: str | None = None
    """Namespace of the objects; None leaves it to `kubectl`."""

    retries: int = 3
    """Number of times that a run may be started again, each in a cluster of its own."""

    dry_run: bool = False
    """True where the manifest is only shown."""

    def __post_init__(self) -> None:
        for key, least in (("nodes", 1), ("cpus_per_node", 1), ("gpus_per_node", 0), ("retries", 0)):
            if (number := getattr(self, key)) < least:
                raise ValueError(f"`--{key.replace('_', '-')}` must be at least {least}, got {number}.")
        if not re.fullmatch(r"\d+(\.\d+)?([KMGT]i?)?", self.memory):
            raise ValueError(f"`--memory {self.memory}`: expected a size such as `512Gi`.")
        if not self.mount.startswith("/"):
            raise ValueError(f"`--mount {self.mount}`: expected a path from the root, such as `/shared`.")


def parse(argv: Sequence[str]) -> tuple[KubernetesOptions, Run]:
    """Reads and checks the words after ``verl-fit kubernetes``.

    Raises:
        ValueError: If the run or Kubernetes is certain to refuse them.
        FileNotFoundError: If a configuration does not exist.
    """
    given, words = split_words(make_parser(), argv)
    options = KubernetesOptions(**vars(given))
    if words[0] != "ray":
        if not options.gpus_per_node:
            raise ValueError("Say how many processes there are: `--gpus-per-node`, or `ray --num-workers N`.")
        words = ["ray", "--num-workers", str(options.nodes * options.gpus_per_node), "--", *words]
    parse_launch(words[1:])
    run = read_run(words, options.name)
    check_ray_fits(run, nodes=options.nodes, cpus=options.cpus_per_node, gpus=options.gpus_per_node)
    return options, run


def make_parser() -> argparse.ArgumentParser:
    """The options of ``verl-fit kubernetes``."""
    parser = argparse.ArgumentParser(
        prog="verl-fit kubernetes",
        usage="verl-fit kubernetes --image I --claim C --cpus-per-node N [KUBERNETES' OPTIONS] [--] [ray ...] --config"
        " FILE_OR_NAME [--KEY VALUE ...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    defaults = KubernetesOptions(image="", claim="", cpus_per_node=1)
    parser.add_argument("--image", required=True, help="with this package, Ray and what the settings need")
    parser.add_argument("--claim", required=True, help="name of the claim for a volume that all pods write to")
    parser.add_argument("--cpus-per-node", type=int, required=True, help="of a pod that trains")
    parser.add_argument("--nodes", type=int, default=defaults.nodes, help="pods that train (%(default)s)")
    parser.add_argument("--gpus-per-node", type=int, default=defaults.gpus_per_node, help="with a process each")
    parser.add_argument("--memory", default=defaults.memory, help="of a pod that trains (%(default)s)")
    parser.add_argument("--mount", default=defaults.mount, help="folder of the volume in each pod (%(default)s)")
    parser.add_argument("--name", help="of the job and the run's folder (configuration and time)")
    parser.add_argument("--namespace", help="of the objects")
    parser.add_argument("--retries", type=int, default=defaults.retries, help="starts after the first (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="show the manifest, write nothing")
    return parser


def write_manifest(options: KubernetesOptions, run: Run) -> str:
    """Writes the manifest of a run.

    Args:
        options: Options of its objects.
        run: Run that the job starts.

    Raises:
        ValueError: If its name is none of Kubernetes'.
    """
    name = run.name if options.name is not None else re.sub(r"[^a-z0-9-]+", "-", run.name.lower())[:47].strip("-")
    if not OBJECT_NAME.fullmatch(name):
        raise ValueError(
            f"`--name {name}`: expected at most 47 small letters, digits and dashes, such as `grpo-7b`, of which"
            " Kubernetes makes the names of pods."
        )
    words, files = with_mounted_files(run.words)
    if options.retries:
        words = run.going_on(words)
    metadata = {"name": name} | ({} if options.namespace is None else {"namespace": options.namespace})
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files}
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata,
        "spec": {
            "entrypoint": entrypoint(options, run, words),
            "shutdownAfterJobFinishes": True,
            "backoffLimit": options.retries,
            "rayClusterSpec": cluster(options, run, name, has_files=bool(files)),
        },
    }
    objects = [*([config_map] if files else []), job]
    text: str = yaml.dump_all(objects, Dumper=ManifestDumper, sort_keys=False, allow_unicode=True, width=1000)
    return text


def with_mounted_files(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the words with local configurations as the pods have them, and the texts of those by name."""
    changed: list[str] = list(words)
    files: dict[str, str] = {}
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag not in ("-c", "--config"):
            continue
        path = find_config(value if equals else words[at + 1])
        if path in shipped_configs().values():
            continue
        key = path.name if path.name not in files else f"{len(files)}-{path.name}"
        files[key] = path.read_text(encoding="utf-8")
        changed[at if equals else at + 1] = f"{flag}=" * bool(equals) + f"{CONFIGS}/{key}"
    return changed, files


def entrypoint(options: KubernetesOptions, run: Run, words: Sequence[str]) -> str:
    """The command that KubeRay has Ray's head run."""
    assert run.ray is not None
    wait = [] if run.ray.wait else ["--wait", "600"]
    command = ["verl-fit", "ray", *run.ray_words, *wait, "--address", "auto", "--", *words]
    return f"cd {shlex.quote(options.mount)} && {shlex.join(command)}"


def cluster(options: KubernetesOptions, run: Run, name: str, *, has_files: bool) -> dict[str, Any]:
    """The Ray cluster of a job: a head that computes nothing, and the pods that train."""
    grace = math.ceil(run.grace) + MARGIN
    limits: dict[str, Any] = {"cpu": options.cpus_per_node, "memory": options.memory}
    if options.gpus_per_node:
        limits["nvidia.com/gpu"] = options.gpus_per_node
    head = pod(options, name, "ray-head", {"cpu": 2, "memory": "8Gi"}, grace, has_files=has_files)
    worker = pod(options, name, "ray-worker", limits, grace, has_files=has_files)
    group = {
        "groupName": "train",
        "replicas": options.nodes,
        "minReplicas": options.nodes,
        "maxReplicas": options.nodes,
        "rayStartParams": {},
        "template": worker,
    }
    parts = {"headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": head}, "workerGroupSpecs": [group]}
    return ray_version() | parts


def ray_version() -> dict[str, str]:
    """The version of Ray here, which the image should have; empty where Ray is not installed."""
    version = installed_version("ray")
    return {} if version == NOT_INSTALLED else {"rayVersion": version}


def pod(
    options: KubernetesOptions, name: str, container: str, limits: Mapping[str, Any], grace: int, *, has_files: bool
) -> dict[str, Any]:
    """A pod's template, with the shared volume, the configurations, and shared memory for collectives."""
    volumes: list[dict[str, Any]] = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": options.claim}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [{"name": "shared", "mountPath": options.mount}, {"name": "memory", "mountPath": "/dev/shm"}]
    if has_files:
        volumes.append({"name": "configs", "configMap": {"name": name}})
        mounts.append({"name": "configs", "mountPath": CONFIGS})
    resources = {"requests": dict(limits), "limits": dict(limits)}
    own = {"name": container, "image": options.image, "workingDir": options.mount, "resources": resources}
    spec = {"containers": [own | {"volumeMounts": mounts}], "volumes": volumes}
    return {"spec": spec | {"terminationGracePeriodSeconds": grace}}


class ManifestDumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes texts of several lines as they are, and nothing by reference."""

    def ignore_aliases(self, _: Any) -> bool:
        """Has each object be written in full, however often it stands."""
        return True


ManifestDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
