"""Shows the HTML pages of a run in a real browser and keeps screenshots to look at.

``python tests/browser_check.py --out screenshots``, from the root of the repository; needs Chromium, such as
``apt-get install chromium``. Fails if a page logs an error, asks for another file, or lacks what it should show.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.runs import make_ppo, make_prompts, make_rollout, make_trainer
from tests.tiny import write_prompt_file, write_tiny_folder
from verl_lightning.callbacks import ProfilerCallback, RunReport, SamplesTable, StepRange
from verl_lightning.callbacks.samples_page import write_page
from verl_lightning.loggers import ResumableCSVLogger
from verl_lightning.modules.ppo_config import KLConfig

ODD_ROW = {
    "step": 9,
    "data_source": "<b>odd</b>",
    "prompt": "</script><script>document.title = 'broken'</script>",
    "response": "long " * 300 + "\u2028 ünïcödé 数学 👍",
    "reward": 1.0,
    "advantage": -0.5,
    "ground_truth": {"answer": "<i>42</i>"},
    "reward_parts": {"accuracy": 0.25},
    "is_truncated": True,
    "tokens": ["<u>", "</script>", "tool"],
    "token_ids": [7, 8, 9],
    "log_probs": [-0.1, -6.5, 0.0],
    "is_trained": [True, True, False],
    "turns": [
        {"role": "assistant", "text": "<s>call</s>", "reward": 0.5},
        {"role": "tool", "text": "result", "tool": "search", "seconds": 1.25, "is_trained": False},
    ],
}

OPEN_ALL = "<script>for (const row of [...get('rows').children]) row.click();</script></body>"
"""Script that opens the details of all rows, for a screenshot."""


def make_pages(folder: Path) -> dict[str, tuple[Path, list[str]]]:
    """A short run's pages, and what each must show."""
    model, prompts = write_tiny_folder(folder / "model"), write_prompt_file(folder / "prompts.jsonl")
    profiler = ProfilerCallback(steps=StepRange(first=2, last=3), folder=str(folder / "profile"))
    samples = SamplesTable(num_rows=12, train_every_n_steps=1)
    logger = ResumableCSVLogger(str(folder), version="run")
    options = {"val_check_interval": 2, "check_val_every_n_epoch": None, "log_every_n_steps": 1, "max_steps": 4}
    trainer = make_trainer(folder, profiler, make_rollout(), samples, RunReport(), logger=logger, **options)
    trainer.fit(make_ppo(model, kl=KLConfig()), datamodule=make_prompts(prompts, prompts))
    rows = [ODD_ROW, ODD_ROW | {"reward": math.nan, "advantage": None}]
    tables = samples.page.parent
    (tables / "train_step=9.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    opened = write_page(tables, max_tables=50).with_name("opened.html")
    opened.write_text(samples.page.read_text(encoding="utf-8").replace("</body>", OPEN_ALL), encoding="utf-8")
    phases = ["update_actor", "hooks and data", "Step 2:", "Step 3:", 'title="gen:']
    return {
        "timeline": (folder / "profile/timeline_rank=0.html", phases),
        "samples": (
            samples.page,
            ["&lt;b&gt;odd&lt;/b&gt;", "2 of 2 responses, mean reward 1.000", "ünïcödé 数学 👍", "step 4, validation"],
        ),
        "opened": (
            opened,
            ["&lt;i&gt;42", "0.250", "truncated", "id 8, log-prob -6.5", "search, 1.250 s, not trained"],
        ),
        "report": (
            logger.log_dir / Path("report.html"),
            [">finished</span>", "critic/score/mean", "<polyline points=", "ground truth", "update_actor", "torch"],
        ),
    }


def browse(browser: str, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Opens a page without a window."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += ["--hide-scrollbars", "--window-size=1200,900", *options, page.resolve().as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


def check(browser: str, name: str, page: Path, wanted: list[str], out: Path) -> list[str]:
    """What is wrong with a page; its screenshot lies in ``out``."""
    shown = browse(browser, page, "--dump-dom").stdout
    logged = browse(browser, page, f"--screenshot={out / name}.png").stderr
    problems = [f"{name} does not show {text!r}" for text in wanted if text not in shown]
    problems += [f"{name} logs {line}" for line in logged.splitlines() if "CONSOLE" in line]
    if "<title>broken" in shown:
        problems.append(f"{name} ran a script of a response")
    if re.search(r"""<link|\bsrc\s*=|@import|url\(""", page.read_text(encoding="utf-8")):
        problems.append(f"{name} asks for another file")
    return problems


def main() -> None:
    """Check every page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome"))
    parser.add_argument("--out", type=Path, default=Path("screenshots"))
    arguments = parser.parse_args()
    if arguments.browser is None:
        raise SystemExit("No browser was found: `apt-get install chromium`, or give its path as `--browser`.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        pages = make_pages(Path(folder))
        problems = [
            problem
            for name, (page, wanted) in pages.items()
            for problem in check(arguments.browser, name, page, wanted, arguments.out)
        ]
    if problems:
        raise SystemExit("\n".join(problems))
    sys.stdout.write(f"{len(pages)} pages are fine; look at {arguments.out}/*.png\n")


if __name__ == "__main__":
    main()
