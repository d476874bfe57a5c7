"""Fixtures that every test folder uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import settings
from jaxtyping import install_import_hook

# Every shape that the maths declares is checked, which training never pays for. Before anything imports these rooms.
for room in ("verl_lightning.algorithms", "verl_lightning.functional"):
    install_import_hook(room, "beartype.beartype")

from tests.tiny import write_chat_file, write_pair_file, write_prompt_file, write_tiny_folder  # noqa: E402

# A busy machine must not fail a test that is right, and CI must see what we saw.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the real model of the opt-in tests lies, and how many random chats there are."""
    parser.addoption("--real-model", type=Path, help="folder of a pretrained chat model, for `-m real_model`")
    parser.addoption("--chats", type=int, default=3, help="random chats under each published template")


@pytest.fixture(scope="session")
def chats_per_template(request: pytest.FixtureRequest) -> int:
    """Random chats under each published template."""
    return int(request.config.getoption("--chats"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with the tiny model and its tokenizer."""
    return write_tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 ``sort4`` prompts in verl's schema."""
    return write_prompt_file(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="session")
def chat_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 ``sort4`` chats, a question and its answer each."""
    return write_chat_file(tmp_path_factory.mktemp("chats") / "chats.jsonl")


@pytest.fixture(scope="session")
def pair_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 ``sort4`` questions, each with a chosen and a rejected answer."""
    return write_pair_file(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


@pytest.fixture(autouse=True)
def keep_environment() -> Iterator[None]:
    """Take back what a run in this process sets, such as Lightning's `LOCAL_RANK`: no test depends on others."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def end_process_group() -> Iterator[None]:
    """Leave no process group of a ``ddp`` run of one process to later tests, which Lightning would take for ranks.

    One that a vLLM engine of the whole module has made before is its own.
    """
    is_older = dist.is_available() and dist.is_initialized()
    yield
    if dist.is_available() and dist.is_initialized() and not is_older:
        dist.destroy_process_group()
