"""Tree decoding: propose, verify step, accept, commit; the plain loop's tokens in fewer steps.

What "the same tokens" means: both loops take, at each position, the base model's own choice given
the same prefix (and, when sampling, the same noise). A verify step multiplies matrices of other
shapes than a plain step, so its float32 logits differ from the plain ones by rounding (about 1e-6
relative). A choice changes only where the two best tokens are closer than that: a near-tie, which
in float32 is rare enough not to occur in thousands of tokens, but is no impossibility, and which in
bfloat16 (1e-2) is common.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specheads.acceptance import walk
from specheads.decoding.plain import draw_next, process
from specheads.decoding.result import (
    DecodeResult,
    OnTokens,
    Output,
    Stopping,
    check_request,
    positions,
)
from specheads.decoding.sampling import Sampler
from specheads.drafters.contract import FINAL, Candidates, Drafter, StepResult
from specheads.kv_cache import TreeCache
from specheads.models.base import capture_hidden
from specheads.tree_mask import check_tree_support, tree_attention

# processors that look at the logits alone: one call serves all nodes of a tree
PREFIX_FREE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


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
    logits = prefill(model, prompt, cache)
    root = draw_next(logits, sampler, output.ids, logits_processor)
    output.emit(root.tolist())
    state = drafter.start(prompt, hidden(), root)
    while not output.done:
        candidates = propose(drafter, state, output.budget)
        start = cache.get_seq_length()
        logits = verify(model, candidates, cache, start)
        result = accept(candidates, logits, hidden(), sampler, output.ids, logits_processor)
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


def prefill(model: PreTrainedModel, input_ids: Tensor, cache: TreeCache) -> Tensor:
    """Read the prompt into the cache; returns the logits [B, V] after its last token."""
    output = model(
        input_ids=input_ids,
        position_ids=positions(0, input_ids.shape[1], input_ids.device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1]


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
    sampler: Sampler,
    ids: Tensor,
    logits_processor: LogitsProcessorList | None,
) -> StepResult:
    """Draw the base model's token at the nodes and walk down the tree along them.

    Args:
        candidates: what was verified.
        logits: [B, N, V].
        hidden: tap -> [B, N, d].
        sampler: how to draw.
        ids: [B, T], the sequence so far, the root included.
        logits_processor: evaluated at each node with that node's own prefix.
    """
    tree, tokens = candidates.tree, candidates.tokens
    if logits_processor and all(isinstance(p, PREFIX_FREE) for p in logits_processor):
        rows = process(logits_processor, tokens.reshape(-1, 1), logits.flatten(0, 1))
        logits = rows.view_as(logits)
        logits_processor = None
    root_position = torch.full((ids.shape[0],), ids.shape[1] - 1, device=ids.device)
    if logits_processor:
        base_tokens = _draw_on_path(candidates, logits, sampler, ids, logits_processor)
    else:
        base_tokens = sampler.draw_tree(logits, tree, root_position)
    path, num_accepted = walk(tokens, tree, base_tokens)
    emitted = base_tokens.gather(1, path.clamp(min=0)).masked_fill(path < 0, -1)
    new_tokens = [[t for t in row if t >= 0] for row in emitted.tolist()]  # the step's only sync
    return StepResult(
        tree=tree,
        tokens=tokens,
        base_tokens=base_tokens,
        hidden=hidden,
        path=path,
        num_accepted=num_accepted,
        next_root=emitted.gather(1, num_accepted[:, None])[:, 0],
        new_tokens=new_tokens,
    )


def _draw_on_path(
    candidates: Candidates,
    logits: Tensor,
    sampler: Sampler,
    ids: Tensor,
    logits_processor: LogitsProcessorList,
) -> Tensor:
    """Draw node by node, as processors need the prefix; nodes off the path keep the raw best."""
    tree = candidates.tree
    tokens, parents = candidates.tokens[0].tolist(), tree.parents.tolist()
    base_tokens = logits.argmax(-1)
    here = [0]  # the nodes with the prefix `ids`: one, or several if equal siblings were not merged
    while here:
        token = draw_next(logits[:, here[0]], sampler, ids, logits_processor)
        base_tokens[:, here] = token[:, None]
        ids = torch.cat([ids, token[:, None]], dim=1)
        drawn = int(token)
        here = [i for i in range(tree.num_nodes) if parents[i] in here and tokens[i] == drawn]
    return base_tokens


def commit(cache: TreeCache, start: int, result: StepResult) -> None:
    """Keep the accepted path in the cache, where the tree was written from ``start`` on."""
    cache.compact(start, result.path[:, : len(result.new_tokens[0])])
