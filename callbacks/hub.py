"""A repository on the Hugging Face hub, to which a run's model is sent."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError

from verl_lightning.faults import RunError

LOGIN = "Log in (`hf auth login`, or the variable `HF_TOKEN`) with a token that may write there."


class HubRepository:
    """A repository for a model, made where there is none.

    Args:
        name: Its name, such as ``me/my-model``.
        private: True has a new one be seen by its owner only.
    """

    def __init__(self, name: str, *, private: bool) -> None:
        self.name = name
        self.private = private

    def prepare(self) -> str | None:
        """Makes the repository unless it is there; returns why it can't be written to, None if it can."""
        try:
            self._api().create_repo(self.name, private=self.private, exist_ok=True)
        except (httpx.HTTPError, LocalTokenNotFoundError, OSError, ValueError) as error:
            return f"`HFCheckpoint(push_to_hub={self.name!r})`: {_first_line(error)}. {LOGIN}"
        return None

    def upload(self, folder: Path, message: str) -> str:
        """Commits a folder, and returns the commit's address.

        Args:
            folder: Folder whose files take the place of those of the same names.
            message: Message of the commit.

        Raises:
            RunError: If the hub does not take it.
        """
        try:
            return self._api().upload_folder(repo_id=self.name, folder_path=folder, commit_message=message).commit_url
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise RunError(
                f"`{folder}` could not be sent to `{self.name}` ({_first_line(error)}). Send it by hand:"
                f" `hf upload {self.name} {folder}`."
            ) from error

    def _api(self) -> HfApi:
        return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0].rstrip(".")
