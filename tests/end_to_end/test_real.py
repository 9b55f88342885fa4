"""SmolLM2 with the heads that ship, as a user has it; ``make test-real``, which fetches it."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

from specheads.decoding.exported import load_subject
from specheads.decoding.stream import Job
from specheads.measure.bench import Contest, make_rows
from specheads.measure.clock import clock, prompts_of
from specheads.models.base import load_base_model
from specheads.models.support import tree_support
from tests.end_to_end.conftest import Program
from tests.end_to_end.test_pages_run import OURS, SHORT, program_and_rest
from tests.processes import ROOT, run
from tests.ragged import steps_and_differing

pytestmark = pytest.mark.real

HEADS = "smollm2"
QUESTIONS = ROOT / "data" / "real" / "questions.jsonl"
NUM_QUESTIONS, MAX_NEW_TOKENS = 24, 64  # three questions of each kind
NAMED = [words for words in OURS if any("smollm2" in word for word in words)]


def test_the_doctor_says_tree(program: Program) -> None:
    """A base that is read wrongly (permuted keys, another rope) decodes nonsense in trees."""
    done = program("doctor", "model=smollm2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^verdict +tree", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafted_texts_are_plain_ones(dtype: str) -> None:
    """Heads for a base that says something else than the base alone are another model.

    Where texts differ, it is at a near-tie: closer than rounding was measured to move two logits
    along such texts. In bfloat16 that is a few times the root mean square that the self-test
    measures of one logit, in float32 it hardly ever happens.
    """
    subject = load_subject(HEADS, dtype=dtype)
    assert subject.export is not None
    base, heads = subject.base, subject.export.heads
    prompts, _ = prompts_of(base, subject.tokenizer, QUESTIONS, NUM_QUESTIONS, MAX_NEW_TOKENS)
    contest = Contest.of(subject, MAX_NEW_TOKENS)
    methods = [contest.ours(), *contest.of_trees(heads, [subject.export.tree])]
    runs = clock(methods, prompts, 0.0, repeats=1)
    rows, _ = make_rows(base, methods, prompts, {(0.0, 1): runs}, most_texts=3)
    (row,) = (row for row in rows if row["method"] == "tree")
    assert row["compared"] == len(prompts) == NUM_QUESTIONS
    assert row["identical"] + row["near_ties"] == NUM_QUESTIONS, row["divergences"]
    assert row["accept_length"] > 1.2, "heads that guess nothing are those of another base"
    if dtype == "float32":
        assert row["identical"] >= NUM_QUESTIONS - 1, row["divergences"]
        return
    most = 5 * tree_support(base).error
    assert [of for of in row["divergences"] if of["margin_dtype"] >= most] == []


def test_an_answer_is_the_same_beside_any_others() -> None:
    """In 16 bits, what a run was killed in would go on with answers that no other run gives."""
    base = load_base_model("smollm2", dtype=torch.bfloat16)
    chance = random.Random(3)
    # 33 is a block of kernels' queries, and one
    jobs = [Job(chance.choices(range(5, 9000), k=n), 6, n) for n in (33, 33, 33, 33, 60, 9)]
    turns = ((6, jobs), *((2, [job]) for job in jobs[:4]), (3, jobs[::-1]))
    assert steps_and_differing(base, turns) == (6 * 6, 0)
    # texts on all sides of the blocks that attention is summed in
    jobs = [
        Job(chance.choices(range(5, 9000), k=chance.randrange(15, 240)), 24, n) for n in range(72)
    ]
    texts, differing = steps_and_differing(base, ((64, jobs), (16, jobs[::-1])))
    assert texts > 72 * 20 and differing == 0


def test_chat_answers(tmp_path: Path) -> None:
    """A template or an end of text that was lost shows in the first answer, and in nothing else."""
    words = [f"checkpoint={HEADS}", "max_new_tokens=32", "beside=true"]
    asked = "What is the capital of France?\n"
    done = run("-m", "specheads.chat", *words, cwd=tmp_path, stdin=asked)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and "<|im_" not in done.stdout


@pytest.mark.parametrize("words", NAMED, ids=" ".join)
def test_a_command_of_a_page_runs(words: list[str], tmp_path: Path) -> None:
    """The page's first command is what everybody tries; what takes long is shortened."""
    name, given = program_and_rest(words)
    if name == "auto" or any("=runs/" in word for word in given):
        pytest.skip("needs what another command of the page makes")
    (tmp_path / "questions.txt").write_text("What is a prime number?\nName three colours.\n")
    done = run("-m", f"specheads.{name}", *given, *SHORT[name], cwd=tmp_path, stdin="Hello!\n")
    assert done.returncode == 0, done.stdout + done.stderr


def test_auto_in_five_minutes(program: Program, tmp_path: Path) -> None:
    """The one command that needs nothing but a name ends with an export that decodes."""
    own = "-m", "specheads.auto", "model=smollm2", "minutes=5"
    # with one thread, which tests have, five minutes are too few
    done = run(*own, cwd=tmp_path, env={"OMP_NUM_THREADS": None})
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout + done.stderr
    (export,) = re.findall(r"^specheads: heads: (\S+),", told, re.MULTILINE)
    given = f"checkpoint={tmp_path / export}", "prompt=Hello", "max_new_tokens=8"
    done = program("generate", *given)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
