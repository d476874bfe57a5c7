"""Programs that speak OpenAI's API are agents of the policy, unchanged, and their tokens are the engine's."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import CSVLogger

from tests.data.published import tokenizer_for
from tests.environments.agent_functions import agent, silent
from tests.environments.worlds import END, play, say_seven
from tests.nativeness import CALLBACKS
from tests.runs import Recorder, make_ppo, make_prompts, make_rollout, make_trainer
from tests.tiny import tiny_tokenizer
from verl_lightning.environments.config import Environments
from verl_lightning.faults import RunError
from verl_lightning.rollout.base import Completion

AGENT = {"agent": "tests.environments.agent_functions.agent", "timeout": 60.0}


def parts(environment, *names, **options):
    """Episodes of agents that play these parts."""
    return agents(environment, *({"part": name} for name in names), **options)


def agents(environment, *rows, generate=say_seven, **config):
    """Episodes of agents about these rows."""
    return play(environment, rows, generate, max_new_tokens=200, max_prompt_length=200, **config)


@pytest.fixture(scope="module")
def episodes():
    """One of each part that goes well."""
    names = ("linear", "branched", "streaming", "refused")
    with pytest.warns(UserWarning, match="Agents set `temperature`, but the policy is sampled as `rollout.sampling`"):
        return dict(zip(names, parts(AGENT, *names), strict=True))


def test_a_conversation_is_one_trajectory_of_sampled_tokens(episodes):
    episode, tokenizer = episodes["linear"], tiny_tokenizer()

    chat = [
        {"role": role, "content": text}
        for role, text in zip(["user", "assistant"] * 2, ["5 1", "7", "12", "7"], strict=True)
    ]
    seven = tokenizer.convert_tokens_to_ids("7")
    own = [token for token, is_own in zip(episode.token_ids, episode.is_own, strict=True) if is_own]
    said = tokenizer.decode(episode.prompt_ids + episode.token_ids)
    assert tokenizer.apply_chat_template(chat, tokenize=False).startswith(said)
    assert own == [seven, END] * 2
    assert episode.episode.rewards == [0.0, 1.0]
    assert episode.episode.past == []
    assert [message["content"] for message in episode.episode.messages] == ["5 1", "7", "12", "7"]


def test_branched_and_compacted_histories_are_trajectories(episodes):
    episode, tokenizer = episodes["branched"].episode, tiny_tokenizer()

    assert episode.reward == 1.0
    first, second = episode.past
    assert first.turn_ends == [2, len(first.token_ids)]
    assert second.turn_ends == [2]
    assert tokenizer.decode(second.prompt_ids).count("7") == 1  # what was said before the branch is learnt once
    assert tokenizer.decode(episodes["branched"].prompt_ids).count("7") == 0
    assert [len(each.token_ids) for each in episode.past] == [len(each.log_probs) for each in episode.past]


def test_streams_choices_completions_and_errors_are_openais(episodes):
    assert episodes["streaming"].episode.reward == 1.0
    assert episodes["refused"].episode.reward == 1.0


def test_tools_of_an_agent_are_called_in_the_templates_format():
    tokenizer = tokenizer_for("qwen2_5")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    said = ['<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>', "It is 5."]

    async def generate(request):
        ids = [*tokenizer(said.pop(0), add_special_tokens=False).input_ids, end]
        return Completion(ids, [-1.0] * len(ids), False, 1)

    (episode,) = play(
        {"agent": agent},
        [{"part": "with_tools"}],
        generate,
        max_new_tokens=400,
        max_prompt_length=4000,
        tokenizer=tokenizer,
        eos=end,
    )

    assert episode.episode.rewards == [0.0, 1.0]
    assert "<tool_response>" in tokenizer.decode(episode.token_ids)


def test_agents_that_fail_are_named_and_cost_no_other():
    names = ("failing", "silent", "wordy", "late", "branched")
    with pytest.warns(UserWarning, match="4 of 5 episodes of a batch could not be finished and are left out"):
        episodes = parts({**AGENT, "timeout": 10.0}, *names, max_error_share=1.0)

    errors = [each.episode.error for each in episodes]
    assert "the agent raised KeyError: 'lost'" in errors[0]
    assert "asked the policy nothing" in errors[1]
    assert "must return its reward, a finite number, or None; got 'good'" in errors[2]
    assert "took longer than its `timeout`" in errors[3]
    assert episodes[3].episode.is_timeout
    assert errors[4] == ""
    with pytest.raises(RunError, match=r"`agent` \(prompt 0, sample 0\): the agent raised KeyError"):
        parts(AGENT, "failing")


def test_an_episode_whose_process_ends_is_played_once_more(tmp_path):
    """The first order ends the process in which the other episode is too, or is about to be."""
    orders = [tmp_path / name for name in ("first", "second")]
    orders[0].touch()

    episodes = agents(AGENT, *({"part": "dying", "order": str(order)} for order in orders))

    assert not orders[0].exists()
    assert [each.episode.error for each in episodes] == ["", ""]
    assert [each.episode.reward for each in episodes] == [1.0, 1.0]
    assert [len(each.episode.past) for each in episodes] == [1, 1]  # two questions, those that were lost not among them


def test_a_run_learns_from_an_agent(tmp_path, tiny_folder, prompt_file):
    recorder = Recorder()
    rollout = make_rollout(max_new_tokens=40, environment={"agent": "tests.environments.agent_functions.two_turns"})

    module = make_ppo(tiny_folder, reward="environment")
    make_trainer(tmp_path, rollout, recorder).fit(module, make_prompts(prompt_file))

    assert len(recorder.steps) == 3
    assert min(recorder.column("actor/grad_norm")) > 0
    assert recorder.column("rollout_corr/abs_log_prob_gap")[0] < 1e-4
    assert recorder.column("critic/score/mean") == pytest.approx(recorder.column("env/two_turns/reward"))


class Writer(callbacks.BasePredictionWriter):
    """Writes nothing."""


STOCK = [
    {
        "EMAWeightAveraging": lambda folder: callbacks.EMAWeightAveraging(decay=0.5),
        "EarlyStopping": lambda folder: callbacks.EarlyStopping("val/reward", mode="max", patience=9),
        "LambdaCallback": lambda folder: callbacks.LambdaCallback(on_train_end=lambda *_: Path(folder, "end").touch()),
        "ModelCheckpoint": lambda folder: callbacks.ModelCheckpoint(folder, "best", monitor="val/reward", mode="max"),
        "ModelCheckpoint(train_time_interval=...)": lambda folder: callbacks.ModelCheckpoint(
            folder, "timed {step}", train_time_interval=timedelta(0), save_top_k=-1
        ),
        "ModelSummary": lambda folder: callbacks.ModelSummary(),
        "OnExceptionCheckpoint": lambda folder: callbacks.OnExceptionCheckpoint(folder),
        "TQDMProgressBar": lambda folder: callbacks.TQDMProgressBar(),
    },
    {
        "BasePredictionWriter": lambda folder: Writer(),
        "DeviceStatsMonitor": lambda folder: callbacks.DeviceStatsMonitor(cpu_stats=True),
        "LearningRateMonitor": lambda folder: callbacks.LearningRateMonitor(),
        "RichModelSummary": lambda folder: callbacks.RichModelSummary(),
        "RichProgressBar": lambda folder: callbacks.RichProgressBar(),
        "SpikeDetection": lambda folder: SpikeDetection(warmup=1, window=2),
        "ThroughputMonitor": lambda folder: callbacks.ThroughputMonitor(batch_size_fn=len, window_size=2),
        "Timer": lambda folder: callbacks.Timer(timedelta(hours=1)),
        "WeightAveraging": lambda folder: callbacks.WeightAveraging(),
    },
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning has a word for most of these on CPUs
@pytest.mark.parametrize("number", range(len(STOCK)))
def test_every_stock_callback_works_beside_an_agent(number, tmp_path, tiny_folder, prompt_file):
    assert {name for stock in STOCK for name in stock} == {
        name for name, stock in CALLBACKS.items() if not stock.refusal
    }
    recorder, made = Recorder(), {name: make(tmp_path / "saved") for name, make in STOCK[number].items()}
    rollout = make_rollout(max_new_tokens=40, environment={"agent": "tests.environments.agent_functions.two_turns"})
    options = {"enable_checkpointing": True, "enable_progress_bar": True, "enable_model_summary": True}
    options |= {"max_steps": 2, "val_check_interval": 1, "log_every_n_steps": 1, "logger": CSVLogger(tmp_path, "", "")}
    trainer = make_trainer(tmp_path, rollout, recorder, *made.values(), **options)
    trainer.fit(make_ppo(tiny_folder, reward="environment"), make_prompts(prompt_file, prompt_file))

    assert trainer.global_step == 2
    assert min(recorder.column("env/two_turns/turns")) >= 1
    if number == 0:
        best = max(validation["val/reward"] for validation in recorder.validations)
        assert float(made["EarlyStopping"].best_score) == pytest.approx(best)
        assert float(made["ModelCheckpoint"].best_model_score) == pytest.approx(best)
        saved = {path.name for path in (tmp_path / "saved").iterdir()}
        assert saved == {"best.ckpt", "timed step=1.ckpt", "timed step=2.ckpt", "end"}
    else:
        columns = (tmp_path / "metrics.csv").read_text().splitlines()[0]
        assert all(name in columns for name in ("lr/actor/pg1", "cpu_percent", "batches_per_sec"))
        assert None not in (made["Timer"].start_time("train"), made["Timer"].end_time("train"))


def test_an_engine_that_fails_ends_the_run_and_not_an_episode():
    async def generate(request):
        raise TimeoutError("the engine is stuck")

    with pytest.raises(TimeoutError, match="the engine is stuck"):
        parts(AGENT, "branched", "late", generate=generate)


def test_one_of_several_environments_may_be_called_agent():
    several = Environments({"agent": {"agent": silent}, "path": {"tools": [agent]}})

    assert several.name_of({"environment": "agent"}) == "agent"


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"agent": lambda client, row: 1.0}, "must be `async def agent.client, row.`"),
        ({"agent": "tests.environments.agent_functions.agnt"}, "does not import.*Did you mean `agent`"),
        ({"agent": silent, "timeot": 3}, "has `agent`, `timeout`, `tool_calls` and `variables`, not `timeot`"),
        ({"agent": silent, "timeout": 0}, "`rollout.environment.timeout` must be a positive number"),
    ],
)
def test_wrong_agents_are_refused(given, complaint):
    with pytest.raises(ValueError, match=complaint):
        Environments(given)
