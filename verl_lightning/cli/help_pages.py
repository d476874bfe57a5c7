"""Help pages of `verl-fit` that need no parser: of the command, and the short ones of its subcommands."""

from __future__ import annotations

from collections.abc import Sequence

HELP = """\
usage: verl-fit [ray --num-workers N] [fit|validate|test] --config FILE_OR_NAME [--KEY VALUE ...]
       verl-fit slurm --time T --nodes N [ray ...] --config FILE_OR_NAME [--KEY VALUE ...]
       verl-fit kubernetes --image I --claim C --cpus-per-node N [ray ...] --config FILE_OR_NAME [--KEY VALUE ...]
       verl-fit migrate FILE [KEY=VALUE ...]
       verl-fit runs [FOLDER]
       verl-fit evaluate --tasks NAMES --config FILE_OR_NAME [--KEY VALUE ...]
       verl-fit doctor [PART ...]

Post-trains language models with reinforcement learning (PPO, GRPO and others) or supervised fine-tuning, on PyTorch
Lightning. Settings come from one or more YAML files, merged in their order; flags always win over files.

  fit        Train; meant when no subcommand is given.
  validate   Evaluate on the validation data; `--ckpt_path` picks the weights.
  test       The same on the test data.
  ray        Any of these in processes that Ray starts on a cluster; see verl-fit ray --help.
  slurm      Write a job script for SLURM that runs any of these; see verl-fit slurm --help.
  kubernetes Write a manifest for KubeRay that runs any of these; see verl-fit kubernetes --help.
  migrate    Translate a configuration of verl; see verl-fit migrate --help.
  runs       List the runs in a folder, how far they are and how they ended.
  evaluate   Run tasks of lm-eval or inspect on a policy; see verl-fit evaluate --help.
  doctor     Show versions, GPUs, and what each part needs; see verl-fit doctor --help.

Examples:
  verl-fit --config grpo                           a configuration that ships with the package
  verl-fit --config my.yaml --trainer.max_steps 10 --model.actor.optim.lr 2e-6
  verl-fit --config my.yaml --strategy ddp         short for --trainer.strategy ddp
  verl-fit --config my.yaml --name first           a run of this name, in runs/first
  verl-fit --config my.yaml --ckpt_path last       go on with the newest run; auto begins anew where there is none
  verl-fit --config my.yaml --print_config         show every setting and stop

Shipped configurations: {shipped}

More help:
  verl-fit fit --help                              the options that most runs set; fit --help all: every one
  verl-fit fit --model.help PPOModule              what the algorithm can be told; also SFTModule, DPOModule and others
  verl-fit fit --data.help PromptDataModule        also ChatDataModule, PreferenceDataModule
  verl-fit fit --rollout.help HFRollout            how responses are sampled
  verl-fit fit --trainer.callbacks.help EarlyStopping
  verl-fit --version
"""

TASKS = {"fit": "Trains", "validate": "Evaluates on the validation data", "test": "Evaluates on the test data"}
"""Description of each subcommand."""

SHORT = """\
usage: verl-fit {command} --config FILE_OR_NAME [--KEY VALUE ...]

{task}. These are the options that most runs set; `verl-fit {command} --help all` shows every one.

The run
  --config FILE_OR_NAME                 settings, such as `grpo`, `ppo`, `sft`, `dpo`; several are merged
  --name NAME                           the run and its folder; else the configuration's name and the time
  --ckpt_path last|auto|FILE            go on with a run; `auto` begins anew where there is none
  --print_config                        show all settings and stop
  --seed_everything 42

Trainer (Lightning's, of which every option can be set)
  --trainer.max_steps 200               iterations of PPO, optimizer steps of SFT
  --trainer.devices 8                   processes on each machine; --trainer.num_nodes 2
  --trainer.precision bf16-mixed
  --trainer.val_check_interval 10       steps from one validation to the next
  --trainer.logger WandbLogger          beside the files in the run's folder
  --trainer.callbacks+=EarlyStopping    one more; its options follow as --trainer.callbacks.KEY
  --trainer.default_root_dir runs       folder of all runs

Where tensors live
  --strategy auto|ddp|fsdp|megatron     short for --trainer.strategy
  --fsdp.compile true
  --megatron.tensor_parallel_size 2

Model, of `PPOModule`; `SFTModule`, `DPOModule` and `RewardModule` have the same `actor`
  --model.actor.path FOLDER_OR_NAME     Hugging Face folder, or name on the hub
  --model.actor.optim.lr 1e-6           also `schedule`, `warmup_steps`, `weight_decay`, `max_grad_norm`
  --model.actor.lora.rank 16            adapters in the place of all weights
  --model.reward file.py:function       or a built-in, such as `gsm8k`, `math`, `exact_match`
  --model.advantage GRPO                or GAE, which needs --model.critic, RLOO and others
  --model.policy_loss PPOClip           or GSPO, CISPO and others
  --model.kl.coef 0.001
  --model.update.mini_batch_size 32     prompts of an optimizer step
  --model.update.micro_batch_size 8     sequences of a pass on one rank

Data, of `PromptDataModule`
  --data.train_files rows.jsonl         also parquet, CSV, JSON; --data.val_files
  --data.prompts_per_step 64            prompts of an iteration
  --data.max_prompt_length 512

Rollout, which samples responses
  --rollout HFRollout|VLLMRollout|RayRollout
  --rollout.sampling.num_samples 8      responses to each prompt
  --rollout.sampling.max_new_tokens 512
  --rollout.sampling.temperature 1.0

Other pages: --model.help PPOModule, --data.help ChatDataModule, --rollout.help VLLMRollout,
--trainer.callbacks.help EarlyStopping. All options with their defaults: docs/reference.md.
"""


def short_help(command: str) -> str:
    """Returns the short help page of a subcommand."""
    return SHORT.format(command=command, task=TASKS[command])


def without_all(argv: Sequence[str]) -> list[str]:
    """Returns the words with `--help all` as `--help`, as the parser knows it, whose page has all options."""
    asks = len(argv) > 1 and argv[-2] in ("-h", "--help") and argv[-1] == "all"
    return list(argv[:-1] if asks else argv)
