"""Prompts and conversations: files, tokens, masks, and loaders that resume."""

from verl_lightning.data.chat import ChatDataModule
from verl_lightning.data.prompts import PromptDataModule

__all__ = ["ChatDataModule", "PromptDataModule"]
