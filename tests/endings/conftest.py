"""Settings of a short run that validates, for runs that end in all ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.runs import make_settings


@pytest.fixture(scope="session")
def settings_file(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, prompt_file: Path) -> Path:
    """GRPO of four steps with a checkpoint after the third and a validation of two batches after each second."""
    intervals = {"check_val_every_n_epoch": None, "val_check_interval": 2, "limit_val_batches": 2}
    settings = make_settings(tiny_folder, prompt_file, max_steps=4, **intervals)
    settings["data"]["init_args"] |= {"val_files": str(prompt_file)}
    saves = {"save_top_k": 0, "save_last": True, "every_n_train_steps": 3}
    settings["trainer"]["callbacks"] = [
        {"class_path": "FinalValidation"},
        {"class_path": "ModelCheckpoint", "init_args": saves},
    ]
    file = tmp_path_factory.mktemp("settings") / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file
