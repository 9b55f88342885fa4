"""What a tuned base, or a lossy rule, costs: on held-out answers, and in texts of its own.

Every figure has a 95% interval, bootstrapped over records or prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.config import ConfigError
from specheads.data.chat import Encoded, Encoder
from specheads.data.load import read_jsonl
from specheads.decoding.accept import Acceptance
from specheads.decoding.loop import decode, plain_decode
from specheads.decoding.result import DecodedRow, divergence_said, mean_divergence
from specheads.drafters.contract import Drafter
from specheads.losses.cross_entropy import IGNORE
from specheads.measure.clock import Prompt, kinds_in_turn
from specheads.measure.identity import first_difference, logits_at
from specheads.measure.render import Columns, estimate, make_table
from specheads.measure.rows import bootstrap_ci95, mean_accept_length, ratio_ci95, rep8
from specheads.models.base import context_length
from specheads.system.terminal import progress_bar
from specheads.verification.sampling import Sampler

_ROWS = 256  # rows that become float32 at a time: they are as wide as a vocabulary


@torch.inference_mode()
def loss_of(logits: Tensor, tokens: Sequence[int]) -> float:
    """Return nats over all of N ``tokens``, given the logits [N, V] that each was drawn from."""
    chosen = torch.tensor(list(tokens), device=logits.device)
    parts = zip(logits.split(_ROWS), chosen.split(_ROWS), strict=True)
    losses = [cross_entropy(rows.float(), of, reduction="none") for rows, of in parts]
    return float(torch.cat(losses).double().sum())


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


Reading = dict[str, float]  # what models make of one record's answers, summed over their tokens


def read_answers(
    base: PreTrainedModel, original: PreTrainedModel | None, documents: Sequence[Encoded]
) -> list[Reading]:
    """Read held-out records with one model or two, each token given everything before it.

    Args:
        base: measured.
        original: what it was tuned from.
        documents: each with a token to predict, and no longer than the models' context.

    Returns:
        Of each document ``num_tokens`` of the answers, their ends included; over these ``loss``,
        nats of the measured base; and with an original ``original_loss``, ``loss_difference``
        (measured less original), ``kl``, KL(original || measured), and ``same_best``, the tokens at
        which both find the same one the likeliest.
    """
    found = []
    for document in progress_bar("record", iterable=documents, leave=False):
        ids: list[int] = document.input_ids.tolist()
        places = answer_places(document)
        tokens = [ids[place + 1] for place in places]
        logits = logits_at(base, ids, places)
        reading = {"num_tokens": float(len(tokens)), "loss": loss_of(logits, tokens)}
        if original is not None:
            others = logits_at(original, ids, places)
            kl, same = divergence(others, logits)
            reading["original_loss"] = loss_of(others, tokens)
            reading["loss_difference"] = reading["loss"] - reading["original_loss"]
            reading |= {"kl": float(kl.double().sum()), "same_best": float(same.sum())}
        found.append(reading)
    return found


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
    for record in kinds_in_turn(read_jsonl(data), itemgetter("kind")):
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
    columns = {key: [each[key] for each in readings] for key in readings[0]}
    tokens = columns.pop("num_tokens")
    found: dict[str, Any] = {"num_records": len(readings), "num_tokens": int(sum(tokens))}
    for key, values in columns.items():
        found |= _mean(key, values, tokens)
    for key in {"loss", "original_loss"} & columns.keys():
        found |= _perplexity(found, key)
    return found


def greedy_agreement(
    base: PreTrainedModel,
    original: PreTrainedModel,
    prompts: Sequence[Prompt],
    **settings: Any,
) -> dict[str, Any]:
    """Let both models continue the same prompts greedily, and compare the texts.

    Args:
        base: base model.
        original: what it was tuned from.
        prompts: continued.
        **settings: of the loop: ``max_new_tokens``, ``eos_token_ids``.

    Returns:
        What :func:`agreement` does.
    """
    texts = [
        [plain_decode(model, each.input_ids, **settings).new_tokens for model in (base, original)]
        for each in progress_bar("prompt", iterable=prompts, leave=False)
    ]
    return agreement(*zip(*texts, strict=True))


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Compare texts of the same prompts.

    Returns:
        ``compared`` and ``identical`` texts; ``common_prefix``: tokens before the first
        difference, all of them where there is none, with ``common_prefix_ci95``; ``length``: mean
        tokens of theirs.
    """
    firsts = [first_difference(*pair) for pair in zip(ours, theirs, strict=True)]
    pairs = zip(firsts, theirs, strict=True)
    prefixes = [float(len(text) if first is None else first) for first, text in pairs]
    return {
        "compared": len(prefixes),
        "identical": firsts.count(None),
        **_mean("common_prefix", prefixes, [1.0] * len(prefixes)),
        "length": sum(map(len, theirs)) / len(prefixes),
    }


def lossy_cost(
    base: PreTrainedModel,
    drafter: Drafter,
    acceptance: Acceptance,
    prompts: Sequence[Prompt],
    *,
    temperature: float,
    seed: int,
    **settings: Any,
) -> dict[str, Any]:
    """Decode with a lossy rule, and plainly with the same seeds; let the base judge both.

    A rule that likes what is likely anyway writes texts of *lower* perplexity than the base's own,
    and repeats itself: neither is quality. What differs from the exact texts is what was lost.

    Args:
        base: base model.
        drafter: proposes.
        acceptance: the rule.
        prompts: continued.
        temperature: of the sampling; perplexity is always that of the unmodified distribution.
        seed: prompt n is sampled with ``seed + n``.
        **settings: of both loops: ``max_new_tokens``, ``eos_token_ids``, ``compile``.

    Returns:
        ``lossy`` and ``exact``, each with ``perplexity``, ``perplexity_ci95``, ``rep8``,
        ``accept_length`` and ``ended`` (share of texts); :func:`agreement`'s keys; and
        ``loss_difference`` with its interval: nats per token by which the base likes the lossy
        texts less than the exact ones, below 0 where it likes them more.
    """
    rows: dict[str, list[DecodedRow]] = {"lossy": [], "exact": []}
    for n, prompt in enumerate(progress_bar("prompt", iterable=prompts, leave=False)):
        chosen = {**settings, "sampler": Sampler(temperature=temperature, seed=seed + n)}
        lossy = decode(base, drafter, prompt.input_ids, acceptance=acceptance, **chosen)
        rows["lossy"] += lossy.rows
        rows["exact"] += plain_decode(base, prompt.input_ids, **chosen).rows
    found: dict[str, Any] = {"temperature": temperature}
    columns: list[list[float]] = []
    for name, of in rows.items():
        texts = zip(prompts, of, strict=True)
        losses = [text_loss(base, p.input_ids[0].tolist(), row.new_tokens) for p, row in texts]
        tokens = [float(len(row.new_tokens)) for row in of]
        columns += [losses, tokens]
        found[name] = {
            **_perplexity(_mean("loss", losses, tokens), "loss"),
            "rep8": sum(rep8(row.new_tokens) for row in of) / len(of),
            "accept_length": mean_accept_length([row.accept_lengths for row in of]),
            "ended": sum(row.finished for row in of) / len(of),
            "divergence": mean_divergence(of),
        }
    both = ([row.new_tokens for row in of] for of in rows.values())
    return {**found, **agreement(*both), **_difference(*columns)}


def text_loss(base: PreTrainedModel, prompt: Sequence[int], new_tokens: Sequence[int]) -> float:
    """Return what the base model makes of a text, in nats over all its tokens."""
    ids = [*prompt, *new_tokens]
    return loss_of(logits_at(base, ids[:-1], range(len(prompt) - 1, len(ids) - 1)), new_tokens)


def _mean(key: str, values: Sequence[float], weights: Sequence[float]) -> dict[str, Any]:
    low, high = ratio_ci95([values], [weights])
    return {key: sum(values) / sum(weights), f"{key}_ci95": [low, high]}


def _perplexity(found: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the perplexity, with its interval, of a loss in nats per token."""
    name, ends = key.replace("loss", "perplexity"), found[f"{key}_ci95"]
    return {name: math.exp(found[key]), f"{name}_ci95": [math.exp(end) for end in ends]}


def _difference(*columns: Sequence[float]) -> dict[str, Any]:
    """Bootstrap a difference of two means per token over prompts drawn for both alike.

    Args:
        *columns: of each prompt the loss and tokens of one text, then of the other.
    """
    losses, tokens, losses0, tokens0 = map(sum, columns)
    low, high = bootstrap_ci95(lambda of: of[0] / of[1] - of[2] / of[3], *columns)
    difference = losses / tokens - losses0 / tokens0
    return {"loss_difference": difference, "loss_difference_ci95": [low, high]}


_LOSSY: Columns = {
    "": lambda of: str(of["name"]),
    "perplexity": lambda of: f"{of['perplexity']:.4f}",
    "95%": lambda of: "{:.4f}-{:.4f}".format(*of["perplexity_ci95"]),
    "rep8": lambda of: f"{of['rep8']:.2f}",
    "accept": lambda of: f"{of['accept_length']:.2f}",
    "ended": lambda of: f"{of['ended']:.0%}",
}


def format_quality(result: Mapping[str, Any]) -> str:
    """Return the table.

    Args:
        result: the content of quality.json.
    """
    lines = []
    if (read := result["heldout"]) is not None:
        lines.append(
            f"held-out answers: {read['num_records']} records, {read['num_tokens']:,} tokens"
        )
        lines.append(f"  perplexity            {estimate(read, 'perplexity', '.4f')}")
    if read is not None and "kl" in read:
        worse = read["loss_difference"] / read["original_loss"] if read["original_loss"] else 0.0
        lines += [
            f"  of the original       {estimate(read, 'original_perplexity', '.4f')}",
            f"  loss less original's  {estimate(read, 'loss_difference', '+.4f')} nats per token,"
            f" {worse:+.1%} of the original's",
            f"  KL(original || this)  {estimate(read, 'kl', '.4f')} nats per token",
            f"  same best token       {estimate(read, 'same_best', '.4f')} of the tokens",
        ]
    if (texts := result["texts"]) is not None:
        lines.append(f"greedy texts of both: {_agreeing(texts, '')}")
    if result["original"] is None:
        lines.append(result["why_no_original"])
    if (found := result["lossy"]) is not None:
        both = [{"name": f"  {name}", **found[name]} for name in ("exact", "lossy")]
        lines += [
            f"{result['rule']} at T={found['temperature']:g}, {found['compared']} texts, judged by"
            " the base:",
            make_table(both, _LOSSY).text(),
            f"  loss less that of exact texts {estimate(found, 'loss_difference', '+.4f')} nats"
            " per token; below 0 the rule writes what is likelier, not better",
            f"  {divergence_said(found['lossy']['divergence'])}",
            f"  {_agreeing(found)}",
        ]
    if left_out := result["left_out"]:
        why = ", ".join(f"{number} {reason}" for reason, number in left_out.items())
        lines.append(f"left out of the records: {why}")
    return "\n".join(lines)


def _agreeing(texts: Mapping[str, Any], what: str = " texts") -> str:
    return (
        f"{texts['identical']} of {texts['compared']}{what} identical;"
        f" {estimate(texts, 'common_prefix', '.1f')} tokens alike before the first difference, of"
        f" {texts['length']:.1f}"
    )
