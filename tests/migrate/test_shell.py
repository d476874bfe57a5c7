"""What a shell would start, and what is told where only a shell knows."""

from __future__ import annotations

import pytest

from tests.migrate.checkout import bash_commands
from verl_lightning.migrate.shell import Shell

PLAIN = r"""
set -xeuo pipefail
A=${A:-}; B=${A:-256}   # empty counts as not set
: "${RANK:=32}"
ARGS="a=1 betas="[0.9,0.95]" \
  text='kept' sum=$((2 * (RANK + 4)))"
LIST=(one "two words" '$literal'); LIST+=(last)
declare -a more=(x); export LOWER=Qwen/Model-7B; base=${LOWER##*/}; name=${base,,}; short=${name%-*}
case "$name" in qwen*|model-*) kind=found ;; *) exit 1 ;; esac
if [ "$kind" = found ] && [[ $RANK -gt 16 || -z $A ]]; then size=big; else size=small; fi
function launch() { torchrun --nproc_per_node="$1" "${@:2}" ; }
run() {
  local n=$1
  shift
  program first $ARGS "${LIST[@]}" "${#LIST[@]}" "${LIST[1]}" n=$n $size/$short "all: ${LIST[*]}" "${more[@]}" \
    end  # a comment
}
[ -n "${NOPE:-}" ] && skipped=1 || skipped=0
(( RANK > 31 )) && big=yes
cat <<'END' > file
program not=a command
END
run $((RANK / 2)) && program second "$skipped" $big "a \"b\" \$C" ~/x "${LOWER/Qwen/Other}" ${EMPTY:+no} | tee log
for seed in 1 2; do program loop seed=$seed; done
VAR=1 program "it's" 'a "b"' back\ slash
"""


def test_words_are_those_that_bash_passes(tmp_path):
    """Quotations, splitting, arrays, sums, branches, functions, loops and here-documents."""
    script = tmp_path / "run.sh"
    script.write_text(PLAIN)
    theirs = [words[1:] for words in bash_commands(script, tmp_path) if words[0] == "program"]

    commands = Shell({"HOME": "/home/me"}).run(PLAIN)
    ours = [[word.text for word in command.words[1:]] for command in commands if command.words[0].text == "program"]

    assert len(theirs) == 5
    assert ours == theirs


def words_of(script, **environment):
    (command,) = [each for each in Shell(environment).run(script) if each.words[0].text == "program"]
    return {word.text.partition("=")[0]: word for word in command.words}, command.notes


def test_defaults_and_variables_that_are_set_again_are_told():
    words, _ = words_of('N=${N:-8}\nM=1\nM=2\nprogram n=$N m=$M k=3 t="$N and ${N}"')

    assert words["n"].text == "n=8"
    assert words["n"].notes == ("`N` is not set: its default `8` is taken",)
    assert words["m"].notes == ("`M` is set more than once: its last value is taken, not `1`",)
    assert (words["k"].notes, len(words["t"].notes)) == ((), 1)


def test_a_variable_of_the_environment_is_no_choice():
    words, _ = words_of("N=${N:-8}\nprogram n=$N", N="4")

    assert (words["n"].text, words["n"].notes) == ("n=4", ())


@pytest.mark.parametrize(
    ("script", "text", "notes"),
    [
        ("M=${M:-a}\nX=1\nif [ $M = b ]; then X=2; fi\nprogram x=$X", "x=1",
         ["`M` is not set: its default `a` is taken", '`if [ $M = b ]` does not hold']),
        ("M=${M:-a}\nif [ $M = a ]; then X=2; else X=1; fi\nprogram x=$X", "x=2",
         ["`M` is not set: its default `a` is taken", "`if [ $M = a ]` holds"]),
        ("if nvidia-smi; then X=2; else X=1; fi\nprogram x=$X", "x=2", []),
        ("if [ -d /data ]; then X=2; else X=1; fi\nprogram x=$X", "x=1",
         ["a shell decides `if [ -d /data ]`: it is taken that it does not hold"]),
        ("if [ -d /data ]; then X=2; else exit 1; fi\nprogram x=$X", "x=2",
         ["a shell decides `if [ -d /data ]`: it is taken that it holds"]),
        ("D=$(find gpu)\ncase $D in gpu) X=1 ;; *) exit 1 ;; esac\nprogram x=$X", "x=1",
         ["a shell decides `case $D`, by `$(find gpu)`: the first branch, `gpu`, is taken"]),
        ("X=0\n[ -f x ] && X=1\nprogram x=$X", "x=0",
         ["a shell decides `[ -f x ]`: it is taken that it does not hold"]),
        ("X=0\nwhile [ $# -gt 0 ]; do X=$1; shift; done\nprogram x=$X", "x=0",
         ["a shell decides how often a loop runs: it is taken to run never"]),
    ],
)  # fmt: skip
def test_branches_that_a_shell_chooses_are_told(script, text, notes):
    words, _ = words_of(script.replace("nvidia-smi", "true"))

    assert words["x"].text == text
    assert list(words["x"].notes) == notes


def test_a_case_that_was_chosen_holds_for_what_follows():
    script = "D=$(find gpu)\ncase $D in gpu) X=1 ;; npu) X=2 ;; esac\nif [ $D = npu ]; then Y=2; else Y=1; fi\n"

    words, notes = words_of(f"{script}if [ $D = gpu ]; then program x=$X y=$Y; fi")

    assert (words["x"].text, words["y"].text) == ("x=1", "y=1")
    assert "`if [ $D = gpu ]` holds" in notes


def test_what_only_a_shell_knows_stays_as_it_is_written():
    words, _ = words_of('program date=$(date +%F) arg=$1 "path=${NO_SUCH}/x" all="$@" sum=$((N * 2))')

    assert [word.text for word in words.values()][1:4] == ["date=$(date +%F)", "arg=$1", "path=${NO_SUCH}/x"]
    assert not words["date"].is_known
    assert words["sum"].text == "sum=$((N * 2))"


def test_broken_scripts_are_refused_with_their_line():
    with pytest.raises(ValueError, match=r"expected `fi` in line 2 of the script"):
        Shell({}).run("if true; then\necho x")
