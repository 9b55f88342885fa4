"""A draft model with heads of its own: they let it draft faster, and go on where its chain ends.

Within a step the draft model decodes greedily as a base model with Medusa heads would: each pass
verifies what its heads guess, and its own tokens are the chain. What the heads guess last, no pass
of the draft model has verified; it hangs below the chain's end. All of it is a function of the
prefix, and sample-and-walk stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import repeat

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.tree import Tree
from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.draft_model import DraftCache
from specheads.drafters.draft_tree import check_reads_trees
from specheads.drafters.growing import OneTree, pack, padded
from specheads.drafters.heads import HeadsState, heads_drafter
from specheads.models.forward import pad_rows
from specheads.models.kinds import Heads
from specheads.models.output import OutputLayer, capture_hidden
from specheads.system.errors import at_least, check
from specheads.verification.acceptance import walk_on_host

NUM_PASSES = 2


@dataclass
class DraftHeadsState:
    """Where the rows stand.

    Attributes:
        cache: the draft model's view of them.
        heads: where its heads stand, behind the last token that it has read; its root is what the
            draft model says there. None before it has read any.
    """

    cache: DraftCache
    heads: HeadsState | None = None


@dataclass(eq=False, repr=False)
class DraftHeadsDrafter:
    """Proposes what a draft model and its heads find most likely.

    Args:
        draft: the draft model, in eval mode; of the base model's token ids.
        heads: Medusa or Hydra heads of the draft model.
        output: the draft model's output layer.
        tree: what the heads fill, at every pass and at the end.
        num_passes: of the draft model per step; the first one gives one token of the chain, each
            further one as many as it accepts of its heads' guesses, and one.
        max_tokens: deepest guess; 0 for no limit.

    Raises:
        ValueError: if a number is out of range, for other heads, or if the tree is deeper than the
            heads or wider than the tokens they can guess.
        ConfigError: for a draft model that cannot read a tree.
    """

    draft: PreTrainedModel
    heads: Heads
    output: OutputLayer
    tree: Tree
    _: KW_ONLY
    num_passes: int = NUM_PASSES
    max_tokens: int = 0

    taps = ()
    deterministic = True

    def __post_init__(self) -> None:
        kind = self.heads.kind
        # MTP modules read tokens that are not certain yet
        check(self.heads.for_draft_model, "heads of a draft model", kind, "Medusa or Hydra heads")
        at_least(self, num_passes=1, max_tokens=0)
        check_reads_trees(self.draft)
        self._inner = heads_drafter(self.draft, self.heads, self.output, self.tree)
        self._latest: DraftCache | None = None  # a conversation may go on

    def start(self, prefill: Prefill) -> DraftHeadsState:
        """Start behind the prompt; the draft model reads it with the first guesses."""
        self._latest = DraftCache(self.draft, prefill, self._latest)
        return DraftHeadsState(self._latest)

    @torch.inference_mode()
    def propose(self, state: DraftHeadsState) -> Candidates:
        """Decode with the heads for some passes, and let them guess once more."""
        cache, root = state.cache, state.cache.root
        deepest = self.num_passes * (self.tree.max_depth + 1)
        limits = cache.limits([min(deepest, self.max_tokens or deepest)] * len(root))
        if not any(limits):
            return Candidates(root[:, None], Tree.chain(0).to(root.device))
        with capture_hidden(self.draft, self._inner.taps) as captured:
            heads = self._read(state, captured)
            certain = list(cache.lengths)
            roots = zip(cache.texts, heads.root.tolist(), strict=True)
            chains = [[text[-1], token] for text, token in roots]
            for _ in range(self.num_passes - 1):
                heads = self._pass(cache, heads, chains, captured)
            cache.forward.cache.shorten(certain)
        ends = self._inner.propose(heads).tokens.tolist()
        rows = map(self._hang, chains, ends, limits, repeat(cache.vocab_size))
        return pack(list(rows), root.device)

    def _read(self, state: DraftHeadsState, captured: dict[str, Tensor]) -> HeadsState:
        """Let the draft model and its heads read what they have not; return where heads stand."""
        cache = state.cache
        lengths = [len(text) for text in cache.texts]
        if state.heads is not None and cache.lengths == lengths:
            return state.heads  # asked twice
        before = [min(*each) for each in zip(cache.lengths, (n - 1 for n in lengths), strict=True)]
        said = cache.shared(cache.sync()).argmax(-1)
        unread = [text[n:] for text, n in zip(cache.texts, before, strict=True)]
        tokens, counts = pad_rows(unread, said.device), [len(each) for each in unread]
        if state.heads is None:
            prefill = Prefill(cache.texts, tokens, counts, dict(captured), said)
            state.heads = self._inner.start(prefill)
        else:
            paths = [[*range(count)] for count in counts]
            new = [[*each[1:], last] for each, last in zip(unread, said.tolist(), strict=True)]
            state.heads = self._follow(state.heads, paths, new, captured)
        return state.heads

    def _pass(
        self,
        cache: DraftCache,
        heads: HeadsState,
        chains: list[list[int]],
        captured: dict[str, Tensor],
    ) -> HeadsState:
        """Verify what the heads guess behind the chains, which grow by what the draft model says.

        The cache is to be shortened after.
        """
        guesses = self._inner.propose(heads)
        said = cache.shared(cache.forward.verify(guesses.tokens, self.tree)).argmax(-1).tolist()
        parents = [self.tree.parents.tolist()] * len(said)
        paths = walk_on_host(guesses.tokens.tolist(), parents, said)
        new = [[row[node] for node in path] for row, path in zip(said, paths, strict=True)]
        for chain, more in zip(chains, new, strict=True):
            chain += more
        found = self._follow(heads, paths, new, captured)
        counts = [len(path) for path in paths]
        cache.forward.cache.commit(padded(paths, max(counts)), counts)
        return found

    def _follow(
        self,
        heads: HeadsState,
        paths: Sequence[Sequence[int]],
        new_tokens: list[list[int]],
        captured: dict[str, Tensor],
    ) -> HeadsState:
        """Tell the heads what a pass of the draft model said.

        Args:
            heads: where they stood.
            paths: per row the nodes that stay, from the root.
            new_tokens: per row what the draft model says after each of them.
            captured: the pass's hidden states.
        """
        device, hidden = heads.root.device, dict(captured)
        root = torch.tensor([new[-1] for new in new_tokens], device=device)
        path = padded(paths, max(map(len, paths))).to(device)
        num_accepted = torch.tensor([len(path) - 1 for path in paths], device=device)
        nothing = root[:, None]  # of the tree and its tokens heads are told the path alone
        told = StepResult(self.tree, nothing, nothing, hidden, path, num_accepted, root, new_tokens)
        return self._inner.observe(heads, told)

    def _hang(self, chain: list[int], end: list[int], limit: int, vocab_size: int) -> OneTree:
        """Return a chain with the heads' tree below its end, cut at a depth.

        Args:
            chain: of the draft model, the last certain token first.
            end: tokens of the heads' tree, whose root is the chain's last token.
            limit: the deepest node that stays.
            vocab_size: of the base model, if known; tokens beyond it become padding.
        """
        length = len(chain) - 1
        below = self.tree.parents.tolist()[1:]
        parents = [*range(-1, length), *(length + above for above in below)]
        depths = [*range(length), *(length + depth for depth in self.tree.depths.tolist())]
        size = sum(depth <= limit for depth in depths)  # nodes are sorted by depth
        tokens = [*chain, *end[1:]][:size]
        known = vocab_size or max(tokens) + 1
        return [token if token < known else -1 for token in tokens], parents[:size]

    def observe(self, state: DraftHeadsState, result: StepResult) -> DraftHeadsState:
        """Append the tokens gained."""
        state.cache.observe(result)
        return state

    def select(self, state: DraftHeadsState, rows: Tensor) -> DraftHeadsState:
        """Keep some rows."""
        state.cache.select(rows)
        if state.heads is not None:
            state.heads = self._inner.select(state.heads, rows.to(state.heads.root.device))
        return state

    @torch.inference_mode()
    def join(self, state: DraftHeadsState, other: DraftHeadsState) -> DraftHeadsState:
        """Take the rows of both; draft model and heads read what they have not."""
        with capture_hidden(self.draft, self._inner.taps) as captured:
            heads = [self._read(each, captured) for each in (state, other)]
        state.cache.join(other.cache)
        return DraftHeadsState(state.cache, self._inner.join(*heads))
