"""What a tuned base, or a lossy rule, costs: on held-out answers, and in texts of its own.

Every figure has a 95% interval, bootstrapped over records or prompts.

What a model says at chosen places of a text that is known: one pass, no cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.config import ConfigError
from specheads.data.chat import Encoded, Encoder
from specheads.data.load import read_jsonl
from specheads.data.schema import Record
from specheads.decoding.accept import Acceptance
from specheads.decoding.loop import decode, plain_decode
from specheads.decoding.result import DecodedRow
from specheads.drafters.contract import Drafter
from specheads.losses.cross_entropy import IGNORE
from specheads.measure.clock import Prompt
from specheads.measure.stats import first_difference, mean_accept_length, ratio_ci95, rep8
from specheads.models.base import context_length, input_device
from specheads.verification.sampling import Sampler

_ROWS = 256  # rows that become float32 at a time: they are as wide as a vocabulary


@torch.inference_mode()
def logits_at(model: PreTrainedModel, ids: Sequence[int], places: Sequence[int]) -> Tensor:
    """Return the logits [N, V] of the token behind each of ``places``, in the model's dtype.

    Args:
        model: any causal language model.
        ids: the text, at most as long as the model's context.
        places: N of its positions, rising.
    """
    device = input_device(model)
    text = torch.tensor([list(ids)], device=device)
    kept = torch.tensor(list(places), device=device)
    logits: Tensor = model(
        input_ids=text,
        position_ids=torch.arange(text.shape[1], device=device)[None],
        use_cache=False,
        logits_to_keep=kept,
    ).logits[0]
    if logits.shape[0] != len(places):  # the model has returned them all
        logits = logits[kept.to(logits.device)]
    return logits


@torch.inference_mode()
def log_likelihood(logits: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the logarithm of each token's probability [N], and whether it was the likeliest [N].

    Args:
        logits: [N, V].
        tokens: N.
    """
    chosen = torch.tensor(list(tokens), device=logits.device)
    found, best = [], []
    for rows, of in zip(logits.split(_ROWS), chosen.split(_ROWS), strict=True):
        found.append(rows.float().log_softmax(-1).gather(1, of[:, None])[:, 0])
        best.append(rows.argmax(-1) == of)
    return torch.cat(found).cpu(), torch.cat(best).cpu()


@torch.inference_mode()
def divergence(original: Tensor, tuned: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(original || tuned) per row, in nats, and whether both have the same best token.

    Args:
        original: logits [N, V].
        tuned: logits [N, V']; where embeddings are padded to another size, what both have counts.
    """
    width = min(original.shape[1], tuned.shape[1])
    distances, same = [], []
    for p, q in zip(original.split(_ROWS), tuned.split(_ROWS), strict=True):
        p, q = p[:, :width].float(), q[:, :width].float().to(p.device)
        log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
        terms = log_p.exp() * (log_p - log_q)
        distances.append(terms.masked_fill(log_p.isneginf(), 0.0).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
    return torch.cat(distances).cpu(), torch.cat(same).cpu()


Tick = Callable[[], object]


@dataclass(frozen=True)
class Reading:
    """What models make of one record's answers, given everything before each token.

    Attributes:
        num_tokens: of the answers, their ends included.
        loss: nats over all of them, of the measured base.
        original_loss: of the original; like the others None where there is none.
        kl: KL(original || measured), summed.
        same_best: tokens at which both find the same token the likeliest.
    """

    num_tokens: int
    loss: float
    original_loss: float | None = None
    kl: float | None = None
    same_best: int | None = None


def read_answers(
    base: PreTrainedModel,
    original: PreTrainedModel | None,
    documents: Sequence[Encoded],
    tick: Tick = lambda: None,
) -> list[Reading]:
    """Read held-out records with one model or two.

    Args:
        base: measured.
        original: what it was tuned from.
        documents: each with a token to predict, and no longer than the models' context.
        tick: called after each.

    Raises:
        ValueError: for a document without a token to predict.
    """
    return [_read(base, original, document, tick) for document in documents]


def _read(
    base: PreTrainedModel, original: PreTrainedModel | None, document: Encoded, tick: Tick
) -> Reading:
    ids: list[int] = document.input_ids.tolist()
    places = answer_places(document)
    if not places:
        raise ValueError(f"document {document.id} has 0 tokens to predict")
    tokens = [ids[place + 1] for place in places]
    logits = logits_at(base, ids, places)
    loss = -float(log_likelihood(logits, tokens)[0].double().sum())
    if original is None:
        tick()
        return Reading(len(tokens), loss)
    others = logits_at(original, ids, places)
    kl, same = divergence(others, logits)
    tick()
    return Reading(
        len(tokens),
        loss,
        -float(log_likelihood(others, tokens)[0].double().sum()),
        float(kl.double().sum()),
        int(same.sum()),
    )


def answer_places(document: Encoded) -> list[int]:
    """Return the positions whose next token is one of an answer."""
    labels = document.labels.tolist()
    return [i - 1 for i in range(1, len(labels)) if labels[i] != IGNORE]


def read_documents(
    data: Path,
    tokenizer: PreTrainedTokenizerBase,
    models: Sequence[PreTrainedModel],
    num_records: int,
) -> tuple[list[Encoded], dict[str, int]]:
    """Return the records that all ``models`` can read, and how many they cannot, by reason.

    Args:
        data: a .jsonl of records with answers.
        tokenizer: tokenizer of all models.
        models: the models that are to read them.
        num_records: how many to return at most, of all kinds in turn; 0 for all.

    Raises:
        ConfigError: if the file is wrong, or no record is left.
    """
    context = min(context_length(model) or 1 << 30 for model in models)
    encoder = Encoder(tokenizer)
    documents, left_out = [], {"too long for the context": 0, "without an answer": 0}
    by_kind: dict[str, list[Record]] = {}
    for record in read_jsonl(data):
        by_kind.setdefault(record["kind"], []).append(record)
    in_turn = (each for row in zip_longest(*by_kind.values()) for each in row if each is not None)
    for record in in_turn:
        document = encoder(record)
        if len(document.input_ids) > context:
            left_out["too long for the context"] += 1
        elif not answer_places(document):
            left_out["without an answer"] += 1
        else:
            documents.append(document)
        if num_records and len(documents) == num_records:
            break
    left_out = {reason: number for reason, number in left_out.items() if number}
    if not documents:
        why = ", ".join(f"{number} {reason}" for reason, number in left_out.items())
        raise ConfigError(f"{data} holds no record to read: {why}")
    return documents, left_out


def summarise(readings: Sequence[Reading]) -> dict[str, Any]:
    """Return the figures of held-out records.

    Returns:
        ``num_records``, ``num_tokens``, ``loss`` (nats per token) and ``perplexity``; with an
        original also ``original_loss``, ``original_perplexity``, ``loss_difference`` (measured
        less original), ``kl`` (per token) and ``same_best`` (share of the tokens). Each with
        ``_ci95``.
    """
    tokens = [float(each.num_tokens) for each in readings]
    found: dict[str, Any] = {"num_records": len(readings), "num_tokens": int(sum(tokens))}
    columns = {"loss": [each.loss for each in readings]}
    pairs = [each for each in readings if each.original_loss is not None]
    if pairs:
        columns |= {
            "original_loss": [each.original_loss or 0.0 for each in pairs],
            "loss_difference": [each.loss - (each.original_loss or 0.0) for each in pairs],
            "kl": [each.kl or 0.0 for each in pairs],
            "same_best": [float(each.same_best or 0) for each in pairs],
        }
    for key, values in columns.items():
        found |= _mean(key, values, tokens)
    for key in ("loss", "original_loss"):
        if key in found:
            name = key.replace("loss", "perplexity")
            found[name] = math.exp(found[key])
            found[f"{name}_ci95"] = [math.exp(end) for end in found[f"{key}_ci95"]]
    return found


def greedy_agreement(
    base: PreTrainedModel,
    original: PreTrainedModel,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    eos: tuple[int, ...],
    tick: Tick = lambda: None,
) -> dict[str, Any]:
    """Let both models continue the same prompts greedily, and compare the texts.

    Returns:
        What :func:`agreement` does.
    """
    texts: list[list[list[int]]] = [[], []]
    for prompt in prompts:
        for model, found in zip((base, original), texts, strict=True):
            result = plain_decode(
                model, prompt.input_ids, max_new_tokens=max_new_tokens, eos_token_ids=eos
            )
            found.append(result.new_tokens)
        tick()
    return agreement(*texts)


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Compare texts of the same prompts.

    Returns:
        ``compared`` and ``identical`` texts; ``common_prefix``: tokens before the first
        difference, all of them where there is none, with ``common_prefix_ci95``; ``length``: mean
        tokens of theirs.
    """
    prefixes = []
    for one, other in zip(ours, theirs, strict=True):
        first = first_difference(one, other)
        prefixes.append(float(len(other) if first is None else first))
    return {
        "compared": len(prefixes),
        "identical": sum(list(a) == list(b) for a, b in zip(ours, theirs, strict=True)),
        **_mean("common_prefix", prefixes, [1.0] * len(prefixes)),
        "length": sum(map(len, theirs)) / len(prefixes),
    }


def lossy_cost(
    base: PreTrainedModel,
    drafter: Drafter,
    acceptance: Acceptance,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    eos: tuple[int, ...],
    compile: bool = False,
    tick: Tick = lambda: None,
) -> dict[str, Any]:
    """Decode with a lossy rule, and plainly with the same seeds; let the base judge both.

    A rule that likes what is likely anyway writes texts of *lower* perplexity than the base's own,
    and repeats itself: neither is quality. What differs from the exact texts is what was lost.

    Args:
        base: base model.
        drafter: proposes.
        acceptance: the rule.
        prompts: continued.
        max_new_tokens: limit.
        temperature: of the sampling; perplexity is always that of the unmodified distribution.
        seed: prompt n is sampled with ``seed + n``.
        eos: tokens that end a text.
        compile: compile the base's passes.
        tick: called after every prompt.

    Returns:
        ``lossy`` and ``exact``, each with ``perplexity``, ``perplexity_ci95``, ``rep8``,
        ``accept_length`` and ``ended`` (share of texts); :func:`agreement`'s keys; and
        ``loss_difference`` with its interval: nats per token by which the base likes the lossy
        texts less than the exact ones, below 0 where it likes them more.
    """
    rows: dict[str, list[DecodedRow]] = {"lossy": [], "exact": []}
    losses: dict[str, list[float]] = {"lossy": [], "exact": []}
    for n, prompt in enumerate(prompts):
        sampler = Sampler(temperature=temperature, seed=seed + n)
        ids, options = prompt.input_ids, {"max_new_tokens": max_new_tokens, "eos_token_ids": eos}
        lossy = decode(
            base,
            drafter,
            ids,
            sampler=sampler,
            acceptance=acceptance,
            compile=compile,
            **options,  # type: ignore[arg-type]
        )
        exact = plain_decode(base, ids, sampler=sampler, compile=compile, **options)  # type: ignore[arg-type]
        for name, result in (("lossy", lossy), ("exact", exact)):
            rows[name].append(result.rows[0])
            losses[name].append(text_loss(base, ids[0].tolist(), result.new_tokens))
        tick()
    found: dict[str, Any] = {"temperature": temperature}
    tokens = {name: [float(len(row.new_tokens)) for row in of] for name, of in rows.items()}
    for name, of in rows.items():
        mean = _mean("loss", losses[name], tokens[name])
        found[name] = {
            "perplexity": math.exp(mean["loss"]),
            "perplexity_ci95": [math.exp(end) for end in mean["loss_ci95"]],
            "rep8": sum(rep8(row.new_tokens) for row in of) / len(of),
            "accept_length": mean_accept_length([row.accept_lengths for row in of]),
            "ended": sum(row.finished for row in of) / len(of),
        }
    texts = ([row.new_tokens for row in rows[name]] for name in ("lossy", "exact"))
    return {
        **found,
        **agreement(*texts),
        **_difference(losses["lossy"], tokens["lossy"], losses["exact"], tokens["exact"]),
    }


def text_loss(base: PreTrainedModel, prompt: Sequence[int], new_tokens: Sequence[int]) -> float:
    """Return what the base model makes of a text, in nats over all its tokens."""
    ids = [*prompt, *new_tokens]
    places = range(len(prompt) - 1, len(ids) - 1)
    log_probs, _ = log_likelihood(logits_at(base, ids[:-1], list(places)), new_tokens)
    return -float(log_probs.double().sum())


def _mean(key: str, values: Sequence[float], weights: Sequence[float]) -> dict[str, Any]:
    low, high = ratio_ci95([values], [weights])
    return {key: sum(values) / sum(weights), f"{key}_ci95": [low, high]}


def _difference(
    losses: Sequence[float], tokens: Sequence[float], losses0: Sequence[float],
    tokens0: Sequence[float], *, seed: int = 0, samples: int = 2000,
) -> dict[str, Any]:  # fmt: skip
    """Bootstrap a difference of two means per token over prompts drawn for both alike."""
    columns = [
        torch.tensor(each, dtype=torch.float64) for each in (losses, tokens, losses0, tokens0)
    ]
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(len(losses), (samples, len(losses)), generator=generator)
    a, n, b, m = (column[draws].sum(1) for column in columns)
    ends = (a / n - b / m).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    mean = sum(losses) / sum(tokens) - sum(losses0) / sum(tokens0)
    return {"loss_difference": mean, "loss_difference_ci95": ends.tolist()}
