"""Tree decoding: propose, verify step, accept, commit; the plain loop's tokens in fewer steps.

Both loops take, at each position, the base model's own choice given the same prefix and, when
sampling, the same noise. A verify step multiplies matrices of other shapes than a plain step, so
its logits differ by rounding, and where the two best tokens are closer than that, a near-tie, the
choice could differ. In float32 such a choice (a few in 10,000) is made again from a plain replay of
the text so far, so that the tokens are those of plain decoding and not almost always so. This rests
on rounding being below ``sampling.ROUNDING``. In bfloat16 and float16 rounding is so coarse that
near-ties are common, and no replay is made: outputs are plausible, not identical.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from specheads.acceptance import walk
from specheads.decoding.choosing import Chooser
from specheads.decoding.plain import draw_next, replay, step
from specheads.decoding.result import (
    DecodeResult,
    OnTokens,
    Output,
    Stopping,
    check_request,
)
from specheads.decoding.sampling import Sampler
from specheads.drafters.contract import FINAL, Candidates, Drafter, StepResult
from specheads.kv_cache import TreeCache
from specheads.models.base import capture_hidden
from specheads.tree_mask import tree_attention
from specheads.tree_support import check_tree_support

EXACT_DTYPES = (torch.float32, torch.float64)


def decode(
    model: PreTrainedModel,
    drafter: Drafter,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    eos_token_ids: Collection[int] = (),
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: Stopping | None = None,
    on_tokens: OnTokens | None = None,
) -> DecodeResult:
    """Decode by verifying a tree of guesses in each forward pass.

    Takes what :func:`specheads.decoding.plain.plain_decode` takes and returns its tokens.

    Raises:
        ValueError: for a batch, an empty prompt, more tokens than the model has positions, a
            drafter whose candidates are sampled, or a model that cannot verify a tree.
    """
    check_request(model, input_ids, max_new_tokens)
    if not drafter.deterministic:
        raise ValueError("drafter.deterministic must be True: no rule for sampled candidates yet")
    check_tree_support(model)
    sampler = sampler or Sampler()
    output = Output(input_ids, max_new_tokens, eos_token_ids, stopping_criteria, on_tokens)
    # saves a tenth of the calls' overhead beside no_grad, in the plain loop too
    with torch.inference_mode(), tapped(model, drafter.taps) as hidden:
        _decode(model, drafter, output, sampler, logits_processor, hidden)
    return output.result()


def _decode(
    model: PreTrainedModel,
    drafter: Drafter,
    output: Output,
    sampler: Sampler,
    logits_processor: LogitsProcessorList | None,
    hidden: Callable[[], dict[str, Tensor]],
) -> None:
    prompt = output.input_ids
    cache = TreeCache()
    logits = step(model, prompt, cache, 0)
    root = draw_next(logits, sampler, output.ids, logits_processor)
    output.emit(root.tolist())
    state = drafter.start(prompt, hidden(), root)

    def settle(ids: Tensor) -> Tensor:
        output.num_replays += 1
        return replay(model, ids, output.num_prompt_tokens)

    chooser = Chooser(sampler, logits_processor, settle if logits.dtype in EXACT_DTYPES else None)
    while not output.done:
        candidates = propose(drafter, state, output.budget)
        start = cache.get_seq_length()
        logits = verify(model, candidates, cache, start)
        result = accept(candidates, logits, hidden(), chooser, output.ids)
        output.emit(result.new_tokens[0])
        commit(cache, start, result)
        state = drafter.observe(state, result)


@contextlib.contextmanager
def tapped(
    model: PreTrainedModel, taps: Collection[str]
) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Give a function that returns the latest forward pass's hidden states, tap -> [B, T, d].

    Raises:
        ValueError: for an unknown tap.
    """
    if unknown := set(taps) - {FINAL}:
        raise ValueError(f"taps must be among ({FINAL},), got {sorted(unknown)}")
    if not taps:
        yield dict
        return
    with capture_hidden(model) as captured:

        def latest() -> dict[str, Tensor]:
            assert captured.hidden is not None
            return {FINAL: captured.hidden}

        yield latest


def propose(drafter: Drafter, state: object, budget: int) -> Candidates:
    """Ask for guesses; cut those that would run past the limit (a step gives one token more)."""
    candidates = drafter.propose(state)
    tree = candidates.tree.trim(budget - 1)
    if tree is candidates.tree:
        return candidates
    return Candidates(candidates.tokens[:, : tree.num_nodes], tree)


def verify(model: PreTrainedModel, candidates: Candidates, cache: TreeCache, start: int) -> Tensor:
    """Run the base model over all nodes at once; returns its logits [B, N, V]."""
    tree = candidates.tree
    cache.reserve(start + tree.num_nodes)
    # a root alone is a plain step
    attention = tree_attention(tree) if tree.num_nodes > 1 else contextlib.nullcontext()
    with attention:
        output = model(
            input_ids=candidates.tokens,
            position_ids=(tree.depths + start)[None],
            past_key_values=cache,
            use_cache=True,
        )
    return output.logits


def accept(
    candidates: Candidates,
    logits: Tensor,
    hidden: dict[str, Tensor],
    chooser: Chooser,
    ids: Tensor,
) -> StepResult:
    """Choose the base model's token at the nodes and walk down the tree along them.

    Args:
        candidates: what was verified.
        logits: [B, N, V].
        hidden: tap -> [B, N, d].
        chooser: how tokens are chosen.
        ids: [B, T], the sequence so far, the root included.
    """
    tree, tokens = candidates.tree, candidates.tokens
    scores = chooser.scores_at_nodes(candidates, logits, ids)
    while True:
        base_tokens = scores.argmax(-1)
        path, num_accepted = walk(tokens, tree, base_tokens)
        emitted = base_tokens.gather(1, path.clamp(min=0)).masked_fill(path < 0, -1)
        ties = chooser.near_ties(logits, scores, path)
        rows, tied = torch.stack([emitted, ties]).tolist()  # the step's only synchronisation
        if 1 not in tied[0]:
            break
        first = tied[0].index(1)
        prefix = torch.cat([ids, emitted[:, :first]], dim=1)
        scores = scores.clone()
        scores[:, path[0, first]] = chooser.settle(prefix)
    return StepResult(
        tree=tree,
        tokens=tokens,
        base_tokens=base_tokens,
        hidden=hidden,
        path=path,
        num_accepted=num_accepted,
        next_root=emitted.gather(1, num_accepted[:, None])[:, 0],
        new_tokens=[[token for token in row if token >= 0] for row in rows],
    )


def commit(cache: TreeCache, start: int, result: StepResult) -> None:
    """Keep the accepted path in the cache, where the tree was written from ``start`` on."""
    cache.compact(start, result.path[:, : len(result.new_tokens[0])])
