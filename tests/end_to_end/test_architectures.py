"""Every architecture: trees give the tokens of plain decoding, alone and in ragged batches.

The reference is the plain loop on each row alone, which in turn must be what transformers'
generate() gives. Where a text ends is worked out from the plain text without an end.
"""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
)

from specheads.attention.tree import Tree, default_tree
from specheads.decoding.loop import decode, plain_decode
from specheads.decoding.result import DecodeResult
from specheads.models import forward
from specheads.verification.sampling import Sampler
from tests.processes import ROOT
from tests.script_modules import load_script
from tests.scripted import ScriptedDrafter
from tests.zoo import CHAIN_MODELS, TREE_MODELS, VOCAB, WINDOW, build

SWEEP = load_script("sweep_architectures")
STORED = json.loads((ROOT / "benchmarks" / "architectures.json").read_text())
LENGTHS = (9, 3, 14, 1)  # of prompts: within the windows and beyond them
NUM_NEW = 14
LETTERS = string.ascii_letters + string.digits + "+-"
TREES = {
    "chain": Tree.chain(4),
    "wide": Tree.from_choices([*((i,) for i in range(6)), *((0, i) for i in range(3))]),
    "best-first": default_tree(4, 12),
}
SAMPLERS = {"greedy": Sampler(), "sampled": Sampler(temperature=0.9, top_k=40, seed=11)}
GENERATE = {"do_sample": False, "max_new_tokens": NUM_NEW, "pad_token_id": 0}
PENALTIES = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}


def penalties() -> LogitsProcessorList:
    """Return two processors that look at the whole text before a token."""
    processors = [RepetitionPenaltyLogitsProcessor(1.4), NoRepeatNGramLogitsProcessor(2)]
    return LogitsProcessorList(processors)


@cache
def prompts() -> list[Tensor]:
    """Return prompts [1, P]."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (1, n), generator=generator) for n in LENGTHS]


@cache
def model_of(name: str) -> PreTrainedModel:
    """Build a model once for all tests."""
    return build(name, seed=6)  # greedy text of a random model soon repeats itself; less with this


@cache
def plain_texts(name: str, sampling: str, penalised: bool) -> list[list[int]]:
    """Return what the plain loop gives for each row alone."""
    sampler, found = SAMPLERS[sampling], []
    for row, ids in enumerate(prompts()):
        own = Sampler(sampler.temperature, sampler.top_k, sampler.top_p, seed=sampler.seed + row)
        processors = penalties() if penalised else None
        result = plain_decode(
            model_of(name), ids, max_new_tokens=NUM_NEW, sampler=own, logits_processor=processors
        )
        found.append(result.new_tokens)
    return found


@cache
def letters() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one letter per token."""
    from tokenizers import Tokenizer, decoders, models

    vocab = {letter: i for i, letter in enumerate(LETTERS)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@dataclass(frozen=True)
class Setting:
    """What is asked of both loops."""

    sampling: str
    penalised: bool = False
    ending: str = ""  # eos, or stop: a string of two tokens


SETTINGS = {
    "greedy": Setting("greedy"),
    "sampled": Setting("sampled"),
    "two penalties": Setting("greedy", penalised=True),
    "eos": Setting("sampled", ending="eos"),
    "stop string": Setting("greedy", ending="stop"),
}


def late(text: list[int], n: int, others: list[int]) -> list[int]:
    """Return a token of ``text`` from the n-th on that comes neither before nor in ``others``."""
    new = [token for i, token in enumerate(text) if i >= n and token not in text[:i] + others]
    return new[:1]


def endings(texts: list[list[int]], kind: str) -> dict[str, object]:
    """Return settings that end some of the texts, early and late, on a node of a tree or a root."""
    if kind == "eos":
        tokens = [late(texts[row], n, texts[0][:4]) for row, n in enumerate((6, 3, 11))]
        return {"eos_token_ids": sum(tokens, [])}
    if kind == "stop":
        pairs = texts[0][5:7], texts[1][7:9]
        strings = ["".join(LETTERS[token] for token in pair) for pair in pairs]
        criteria = StopStringCriteria(letters(), strings)
        return {"stopping_criteria": StoppingCriteriaList([criteria])}
    return {}


def cut(row: int, text: list[int], ending: dict[str, object]) -> list[int]:
    """Return the plain text up to where ``ending`` ends it, found by asking after every token."""
    eos, criteria = ending.get("eos_token_ids", ()), ending.get("stopping_criteria")
    for n in range(1, len(text) + 1):
        if text[n - 1] in eos:  # type: ignore[operator]
            return text[:n]
        if criteria is not None:
            ids = torch.cat([prompts()[row], torch.tensor([text[:n]])], 1)
            if criteria(ids, None).all():  # type: ignore[operator]
                return text[:n]
    return text


def left_padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """Return input_ids and attention_mask [B, P]; the padding is a token like any other."""
    longest = max(row.shape[1] for row in rows)
    ids = torch.full((len(rows), longest), 7)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, longest - row.shape[1] :] = row[0]
        mask[i, longest - row.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def some_trees(name: str, setting: str, num_rows: int) -> dict[str, Tree]:
    """Return all trees for greedy texts, which depend on nothing else; elsewhere one in turn."""
    if setting == "greedy" or name in CHAIN_MODELS:
        return TREES
    turn = [*TREE_MODELS].index(name) + [*SETTINGS].index(setting) + num_rows
    return dict([[*TREES.items()][turn % len(TREES)]])


def compare(
    name: str,
    setting_name: str,
    num_rows: int,
    *,
    row_trees: bool = False,
    always_right: bool = False,
) -> None:
    """Check the tree loop on the first rows, with some trees, against each row's plain text."""
    setting, trees = SETTINGS[setting_name], some_trees(name, setting_name, num_rows)
    texts = plain_texts(name, setting.sampling, setting.penalised)
    truth = [ids[0].tolist() + text for ids, text in zip(prompts(), texts, strict=True)]
    ending = endings(texts, setting.ending)
    expected = [cut(row, text, ending) for row, text in enumerate(texts)][:num_rows]
    if ending:
        assert 1 < len(expected[0]) < NUM_NEW, "nothing ends early: this would prove little"
    hit_rate = 1.0 if ending and always_right else 0.7
    if hit_rate == 1:  # then accepted paths go on behind the end
        lengths = [len(text) - 1 for text in expected if len(text) < NUM_NEW]
        steps = [tree.max_depth + 1 for tree in trees.values()]
        assert any(n % step for n in lengths for step in steps), "no end lies inside a step"
    run = partial(
        decode,
        model_of(name),
        max_new_tokens=NUM_NEW,
        sampler=SAMPLERS[setting.sampling],
        logits_processor=penalties() if setting.penalised else None,
        **ending,  # type: ignore[arg-type]
        **left_padded(prompts()[:num_rows]),
    )
    for tree_name, tree in trees.items():
        drafter = ScriptedDrafter(tree, truth[:num_rows], hit_rate, row_trees=row_trees)
        result: DecodeResult = run(drafter)
        found = [row.new_tokens for row in result.rows]
        assert found == expected, f"{tree_name}, {num_rows} rows"
        if not ending:
            assert result.num_steps < 0.8 * NUM_NEW, "hardly a guess was accepted"


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", TREE_MODELS)
def test_trees_give_the_plain_text(name: str, setting: str) -> None:
    """Prevents an architecture whose masks, positions or cache mean something else in a tree."""
    compare(name, setting, num_rows=1)
    row_trees = setting == "two penalties"
    compare(name, setting, len(LENGTHS), row_trees=row_trees, always_right=True)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", CHAIN_MODELS)
def test_chains_give_the_plain_text(name: str, setting: str) -> None:
    """Prevents a fall-back that is as wrong as what it replaces."""
    compare(name, setting, num_rows=1, always_right=True)


@pytest.mark.parametrize("name", TREE_MODELS | CHAIN_MODELS)
def test_the_plain_text_is_that_of_generate(name: str) -> None:
    """Prevents two loops that are wrong in the same way."""
    assert NUM_NEW + LENGTHS[0] > 2 * WINDOW, "windows must bite"
    for penalised, settings in ((False, {}), (True, PENALTIES)):
        texts = plain_texts(name, "greedy", penalised)
        for row in (0, 1):
            ids = prompts()[row]
            theirs = model_of(name).generate(
                ids, attention_mask=torch.ones_like(ids), **GENERATE, **settings
            )
            assert theirs[0, ids.shape[1] :].tolist() == texts[row]
        assert max(len(set(text)) for text in texts) > 4, "a degenerate text would prove little"


@pytest.mark.parametrize(
    "name,verdict",
    [
        ("qwen3", "tree"),
        ("llama4_text", "tree"),
        ("phi3-longrope", "tree"),
        ("bloom", "chain"),
        ("mamba", "refused"),
        ("moshi", "refused"),
    ],
)
def test_the_sweep_finds_what_its_page_says(name: str, verdict: str) -> None:
    """Prevents a page about the models of another day."""
    found, reason = SWEEP.judge(name)
    assert found == verdict
    assert " ".join(reason.split())[:300] == STORED["verdicts"][verdict][name]


def test_the_sweep_tells_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a page on which all is well because nothing was compared."""
    monkeypatch.setattr(forward, "thresholds", lambda model: forward.Thresholds())
    verdict, reason = SWEEP.judge("llama-longrope")
    assert verdict == "WRONG"
    assert "guesses change the text behind 61 tokens" in reason


def test_the_page_is_what_the_sweep_found() -> None:
    """Prevents a table that was written by hand, or one with a model that is accepted and wrong."""
    page = (ROOT / "docs" / "architectures.md").read_text()
    assert SWEEP.page(page, STORED) == page
    assert f"set to {SWEEP.THRESHOLD}, windows and chunks\nto {SWEEP.WINDOW}." in page
    assert "WRONG" not in STORED["verdicts"]
    assert all(STORED["verdicts"]["refused"].values()), "a refusal without its reason"
