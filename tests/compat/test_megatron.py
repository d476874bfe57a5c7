"""Names of Megatron-Core and Megatron-Bridge that `compat.megatron` uses are where it looks for them."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import fields

import pytest

from verl_lightning.compat import megatron as compat
from verl_lightning.strategies.megatron.runtime import has_transformer_engine, import_megatron

pytestmark = pytest.mark.backend


@pytest.fixture(autouse=True)
def imported() -> None:
    import_megatron()


@pytest.mark.skipif(has_transformer_engine(), reason="it is installed")
def test_the_bridge_is_imported_without_transformer_engine():
    """And knows that there is none, though its classes have been named."""
    import megatron.bridge.peft.utils
    import megatron.core.extensions.transformer_engine

    assert "transformer_engine" not in sys.modules
    assert not megatron.bridge.peft.utils.HAVE_TE
    assert not megatron.core.extensions.transformer_engine.HAVE_TE


def test_megatrons_private_names_are_still_there():
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.core import parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    assert hasattr(parallel_state, "_global_process_group_list")
    assert "_pg_collection" in {field.name for field in fields(GPTModelProvider)}
    assert isinstance(AutoBridge._model_bridge, property)
    assert list(inspect.signature(MegatronModelBridge.load_weights_hf_to_megatron).parameters)[1:3] == [
        "hf_pretrained",
        "megatron_model",
    ]
    assert callable(DistributedOptimizer.get_parameter_state_dp_zero)
    assert callable(DistributedOptimizer.load_parameter_state_from_fully_reshardable)


def test_checkpoints_are_read_and_written_by_private_functions():
    """`test_tampered_folders_run_nothing` and `test_each_item_has_a_crc` show that ours take their places."""
    for name in compat.READERS:
        module = importlib.import_module(f"megatron.core.dist_checkpointing.{name}")
        own = module._get_filesystem_reader
        with compat.reading_by("ours"):
            assert module._get_filesystem_reader("folder", cache_metadata=True) == "ours"
        assert module._get_filesystem_reader is own
    assert callable(compat.item_writer()._write_item)


def test_groups_of_parameters_are_found_by_their_rates():
    """Where this fails, `forget_rates` may have nothing to forget."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    assert set(compat.RATES) <= set(param_group_identifier_keys)
