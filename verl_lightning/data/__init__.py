"""Prompts, conversations and preferences: files, tokens, masks, and loaders that resume."""

from verl_lightning.data.chat import ChatDataModule
from verl_lightning.data.preferences import PreferenceDataModule
from verl_lightning.data.prompts import PromptDataModule

__all__ = ["ChatDataModule", "PreferenceDataModule", "PromptDataModule"]
