"""The contract's defaults around stock strategies, and what our `ddp` does with modules of other projects."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import ClassVar

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from torch import nn
from torch.testing import assert_close

from tests.processes import on_ranks
from tests.runs import make_chats, make_ppo, make_prompts, make_rollout, make_sft, make_trainer
from tests.tolerances import assert_near
from verl_lightning.compat.torch import set_gradient_scale
from verl_lightning.models.config import OptimConfig
from verl_lightning.strategies import STRATEGIES, DDPStrategy, as_contract
from verl_lightning.strategies.base import blank
from verl_lightning.strategies.checkpoint_io import AtomicCheckpointIO
from verl_lightning.types import RowLength, TokenBatch


class OneWeight(LightningModule):
    """Takes two steps an iteration under manual optimization, on a gradient of the test's choice."""

    def __init__(self, gradient, max_norm):
        super().__init__()
        self.automatic_optimization = False
        self.weight = nn.Parameter(torch.zeros(2))
        self.gradient, self.max_norm, self.norms = torch.tensor(gradient), max_norm, []

    def configure_optimizers(self):
        return torch.optim.SGD([self.weight], lr=1.0, fused=True)

    def train_dataloader(self):
        return [0]

    def training_step(self, batch, batch_idx):
        contract = as_contract(self.trainer.strategy)
        for count in (False, True):
            self.weight.grad = self.gradient.clone()
            self.norms.append(float(contract.clip_and_step(self.optimizers(), self.max_norm, count=count)))
            assert self.weight.grad is None or not self.weight.grad.any()


@pytest.mark.parametrize(
    ("gradient", "max_norm", "norm", "moved"),
    [
        ([3.0, 4.0], 1.0, 5.0, [0.6, 0.8]),
        ([3.0, 4.0], 0.0, 5.0, [3.0, 4.0]),
        ([0.3, 0.4], 1.0, 0.5, [0.3, 0.4]),
        ([3.0, float("inf")], 1.0, float("inf"), [0.0, 0.0]),
    ],
)
def test_a_step_clips_to_the_global_norm_and_only_the_counted_one_counts(tmp_path, gradient, max_norm, norm, moved):
    module = OneWeight(gradient, max_norm)
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.fit(module)

    assert module.norms == pytest.approx([norm, norm])
    assert module.weight.tolist() == pytest.approx([-2 * move for move in moved], abs=1e-5)
    assert trainer.global_step == 1


def test_a_nan_gradient_changes_nothing(tmp_path):
    module = OneWeight([float("nan"), 1.0], 1.0)
    make_trainer(tmp_path, max_steps=1).fit(module)
    assert module.weight.tolist() == [0.0, 0.0]


def adamw_after(gradients, **settings):
    """A weight, its optimizer and its state after a step on each gradient, scaled as told."""
    weight = nn.Parameter(torch.ones(2))
    config = OptimConfig(lr=0.1, weight_decay=0.1)
    optimizer = as_contract(SingleDeviceStrategy("cpu")).make_optimizer(nn.ParameterList([weight]), config)
    for gradient in gradients:
        weight.grad = torch.tensor(gradient)
        if settings:
            set_gradient_scale(optimizer, **settings)
        optimizer.step()
    return weight.detach(), optimizer


def test_a_fused_optimizer_scales_and_skips():
    """By the attributes of `torch.amp.GradScaler`, for one step only."""
    one, no = torch.tensor(1.0), torch.tensor(False)
    scaled, optimizer = adamw_after([[2.0, -4.0]], factor=one / 2, skips=no)
    assert_close(scaled, adamw_after([[1.0, -2.0]])[0])
    assert_close(optimizer.param_groups[0]["params"][0].grad, torch.tensor([1.0, -2.0]))
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
    still, optimizer = adamw_after([[1.0, float("nan")]], factor=one * float("nan"), skips=~no)
    assert_close(still, torch.ones(2))
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert (state["step"], state["exp_avg"].any(), state["exp_avg_sq"].any()) == (0, False, False)


def test_gradients_in_bfloat16_are_scaled_too():
    """A model stored in bfloat16 has a norm in bfloat16, which the fused optimizer would refuse."""
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter], lr=0.5, weight_decay=0.0, fused=True)
    parameter.grad = torch.tensor([3.0, -4.0], dtype=torch.bfloat16)

    assert as_contract(SingleDeviceStrategy("cpu")).prepare_step(optimizer, 1.0) == 5
    optimizer.step()

    assert_close(parameter.detach(), torch.tensor([0.5, 1.5], dtype=torch.bfloat16), rtol=0.01, atol=0.0)


def test_a_gradient_of_zeros_moves_nothing():
    """Neither weight decay nor momentum: nothing was learnt from."""
    weight, optimizer = adamw_after([[2.0, -4.0]])
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.zeros(2)

    norm = as_contract(SingleDeviceStrategy("cpu")).prepare_step(optimizer, 1.0)
    before = weight.clone()
    optimizer.step()

    assert norm == 0
    assert not torch.equal(before, torch.ones(2))
    assert_close(parameter.detach(), before, rtol=0, atol=0)
    assert optimizer.state[parameter]["step"] == 1


def test_an_optimizer_that_cannot_scale_is_refused():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(TypeError, match="`SGD` cannot scale gradients while it steps. Give it `fused=True`"):
        set_gradient_scale(optimizer, factor=torch.tensor(1.0), skips=torch.tensor(False))


def test_a_single_device_lends_the_defaults():
    contract = as_contract(SingleDeviceStrategy("cpu"))
    assert (contract.data_parallel_size, contract.data_parallel_rank, contract.gradient_divisor) == (1, 0, 1.0)
    assert contract.gather_over_data_parallel("own") == ["own"]
    assert contract.root_device == torch.device("cpu")


def test_a_stock_strategy_of_several_processes_is_refused():
    with pytest.raises(
        MisconfigurationException, match=r"Lightning's own `DDPStrategy`.*Use `ddp` \(ours takes its place\)"
    ):
        as_contract(LightningDDPStrategy())


@pytest.mark.parametrize("name", ["ddp_fork", "ddp_notebook", "ddp_spawn"])
def test_notebooks_are_told_what_works_there(name):
    with pytest.raises(MisconfigurationException, match=r"In a notebook use one device \(`Trainer\(devices=1\)`\)"):
        as_contract(StrategyRegistry.get(name))


@pytest.mark.parametrize("kind", STRATEGIES.values())
def test_a_timeout_may_be_a_timedelta_as_lightnings_are(kind):
    assert kind(timeout=timedelta(minutes=2)).timeout == kind(timeout=120).timeout == 120.0


class SpareWeight(Callback):
    """Gives the policy a weight that no pass reads."""

    def setup(self, trainer, pl_module, stage):
        pl_module.configure_model()
        pl_module.policy.spare = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    "strategy", ["ddp", "ddp_find_unused_parameters_true", DDPStrategy(find_unused_parameters=True)]
)
def test_ddp_finds_unused_weights_where_it_is_asked_to(tmp_path, tiny_folder, chat_file, strategy):
    trainer, module = make_trainer(tmp_path, SpareWeight(), strategy=strategy, max_steps=2), make_sft(tiny_folder)
    expected = nullcontext()
    if strategy == "ddp":
        expected = pytest.raises(RuntimeError, match="not used in .*`strategy=.ddp_find_unused_parameters_true")

    with expected:
        trainer.fit(module, datamodule=make_chats(chat_file))

    assert strategy == "ddp" or trainer.global_step == 2
    assert isinstance(trainer.strategy, DDPStrategy)


def test_ddp_writes_with_the_io_it_is_given(tmp_path, tiny_folder, chat_file):
    class Io(AtomicCheckpointIO):
        paths: ClassVar[list[str]] = []

        def save_checkpoint(self, checkpoint, path, storage_options=None):
            self.paths.append(path)

    trainer = make_trainer(tmp_path, strategy=DDPStrategy(checkpoint_io=Io()), max_steps=1)
    trainer.fit(make_sft(tiny_folder), datamodule=make_chats(chat_file))
    trainer.save_checkpoint("anywhere")

    assert Io.paths == ["anywhere"]


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_names_give_our_strategies(name):
    strategy = StrategyRegistry.get(name)
    assert type(strategy) is STRATEGIES[name]
    assert as_contract(strategy) is strategy


def train_boring_model(path, strategy):
    seed_everything(0, verbose=False)
    model = BoringModel()
    options = {"strategy": strategy, "devices": 2, "limit_val_batches": 0, "max_steps": 2}
    make_trainer(path, **options).fit(model)
    return {name: weight.clone() for name, weight in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore::Warning")
def test_modules_of_other_projects_train_as_under_lightnings_ddp(tmp_path):
    ours = on_ranks(2, train_boring_model, tmp_path, "ddp")
    theirs = on_ranks(2, train_boring_model, tmp_path, LightningDDPStrategy())
    for results in (ours, theirs):
        assert torch.equal(results[0]["layer.weight"], results[1]["layer.weight"])
    assert_near(ours[0], theirs[0])


def train_ppo(path, folder, prompt_file):
    make_trainer(path, make_rollout(), strategy="ddp", devices=2, max_steps=1).fit(
        make_ppo(folder), datamodule=make_prompts(prompt_file)
    )


def test_our_ddp_warns_of_nothing(tmp_path, tiny_folder, prompt_file):
    """Warnings are errors here, on every rank."""
    on_ranks(2, train_ppo, tmp_path, tiny_folder, prompt_file)


@pytest.mark.parametrize("lengths", [None, (RowLength(3, 2, 1, 2), RowLength(2, 1, 0, 2))])
def test_a_blank_row_says_that_nothing_of_it_is_scored(lengths):
    """Whoever packs it trusts the lengths that it brings."""
    batch = TokenBatch(
        input_ids=torch.tensor([[5, 6, 7], [0, 6, 7]]),
        attention_mask=torch.tensor([[True, True, True], [False, True, True]]),
        response_mask=torch.tensor([[True, True], [False, True]]),
        row_lengths=lengths,
    )

    row = blank(batch)

    assert len(row) == 1
    assert not row.response_mask.any()
    assert row.known_lengths() == (RowLength(3, 0, 1, 2),)
