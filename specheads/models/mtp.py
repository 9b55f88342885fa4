"""Multi-token-prediction heads: each one decoder layer of the base model's own kind.

Head i (counted from 0) predicts the token i + 2 positions ahead. ``parallel`` ones read the trunk,
which is all of the base but its last layer, side by side; ``causal`` ones read it one behind the
other (Gloeckle et al., arXiv:2404.19737, section 2 and figure S11). The base's own last layer is
the paper's first head, so that its n heads are the base and K = n - 1 of these. ``sequential`` ones
read the base's final hidden state, one behind the other, and each the embedding of one more token
(DeepSeek-V3, arXiv:2412.19437, equations 21 to 24).

While decoding, the layer of head k of these, called module k, reads at token position p the token's
embedding and G^{k-1}_{p-1}, what the module before made of the position before; G^{-1} is the
base's final hidden state. Unrolled, G^k_p needs the base's hidden state at p - 1 - k and the tokens
from there on. So everything up to the root (the last certain token, whose hidden state is not known
yet) follows from certain tokens and true hidden states, and :class:`TextCache` computes it from
nothing else: what was drafted and refused leaves no trace. Position p lies in slot p - 1 of every
module; module k has nothing at positions up to k, and its first k slots are masked.

A node of depth m reads, in module k >= m, its token's embedding and what module k - 1 made of its
parent; module m guesses its children. Modules below m would need hidden states that the base has
not computed yet, and nothing asks for them. So when :class:`MtpWalk` comes to depth m, module m
runs over all nodes found so far: each attends to the certain tokens and to its own path.

The layers are transformers' own, whatever they are made of, and take a :class:`TreeLayer` for their
cache, which puts the nodes of a tree behind each row's end.

Shapes: K heads, d hidden size, V vocabulary, B rows, T positions, n nodes of a level, N nodes so
far without the root, L slots.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from specheads.config import ConfigError, MtpConfig
from specheads.models import head_cache
from specheads.models.adapters import plain_copy
from specheads.models.forward import undisturbed
from specheads.models.head_cache import LayerCache, Slots, attention_of, odd_numbers, odd_part
from specheads.models.kinds import Begin, Heads, given
from specheads.models.manifest import one_line
from specheads.models.output import FINAL, TRUNK, OutputLayer, final_norm, layers_of
from specheads.models.packed import Kept, product
from specheads.models.sharded import whole
from specheads.system.errors import one_of


def block_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of one layer like the last one of a base model with ``config``."""
    config = copy.deepcopy(config.get_text_config())
    for key in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        if types := vars(config).get(key):
            setattr(config, key, types[-1:])
    if step := getattr(config, "decoder_sparse_step", None):  # which layers have experts
        last = config.num_hidden_layers - 1
        dense = last in config.mlp_only_layers or (last + 1) % step
        config.decoder_sparse_step, config.mlp_only_layers = 1, [0] if dense else []
    config.num_hidden_layers = 1
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the base; these layers are numbers
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0  # the last layer is never among the dense ones
    return config


def config_from_json(values: dict[str, Any]) -> PreTrainedConfig:
    """Return the config that :meth:`MtpHeads.block` wrote.

    Raises:
        ValueError: if transformers does not know its type.
    """
    values = dict(values)
    kind = values.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"block.model_type is {kind!r}, which transformers does not know")
    return CONFIG_MAPPING[kind](**values)


def decoder_like(config: PreTrainedConfig) -> Any:
    """Return transformers' model of ``config`` without memory, of whose parts heads are made.

    Sets how the layers attend: by sdpa, whatever the base uses; eager where a model cannot.

    Raises:
        ValueError: if it is not built like Llama, or its layers have a state.
    """
    with torch.device("meta"):
        try:
            config._attn_implementation = "sdpa"
            model = AutoModel.from_config(config)
        except ValueError:  # Gemma 2 bounds its scores, gpt-oss has sinks
            config._attn_implementation = "eager"
            model = AutoModel.from_config(config)
    for part in ("layers", "norm", "rotary_emb"):
        if not hasattr(model, part):
            raise ValueError(
                f"{type(model).__name__} has no {part}: MTP heads need a model built like Llama"
            )
    (kind,) = vars(config).get("layer_types") or ("full_attention",)
    if not kind.endswith("_attention") or kind == "linear_attention":
        raise ValueError(
            f"the last layer of {type(model).__name__} is of type {kind}, which would carry "
            "one document's state into the next: MTP heads need attention"
        )
    return model


class MtpLayer(nn.Module):
    """One head: what joins its inputs, a decoder layer, a norm, its own output matrix if any.

    Args:
        like: the model that has such a layer and such a norm, see :func:`decoder_like`.
        config: of the layer.
        sequential: read a token's embedding beside the hidden state.
        own_outputs: rows of its own output matrix; 0 shares the base's.
    """

    def __init__(
        self, like: Any, config: PreTrainedConfig, *, sequential: bool, own_outputs: int
    ) -> None:
        super().__init__()
        width, epsilon = config.hidden_size, getattr(config, "rms_norm_eps", None)
        kind: Any = type(like.norm)
        norm = partial(kind, width, **({"eps": epsilon} if epsilon else {}))
        self.block = type(like.layers[-1])(config, 0)
        self.norm = norm()
        self.enorm = norm() if sequential else None
        self.hnorm = norm() if sequential else None
        self.eh_proj = nn.Linear(2 * width, width, bias=False) if sequential else None
        self.lm_head = nn.Linear(width, own_outputs, bias=False) if own_outputs else None

    def join(self, hidden: Tensor, embedded: Tensor, *, hidden_first: bool) -> Tensor:
        """Return what the layer of a sequential head reads, [..., d].

        Args:
            hidden: [..., d], what the head before made, or the base's final hidden state.
            embedded: [..., d], embeddings of the token that the head before predicts.
            hidden_first: the order in which they lie side by side.
        """
        assert self.enorm is not None and self.hnorm is not None and self.eh_proj is not None
        weight = self.eh_proj.weight
        parts = [self.enorm(embedded.to(weight.dtype)), self.hnorm(hidden.to(weight.dtype))]
        return self.eh_proj(torch.cat(parts[::-1] if hidden_first else parts, dim=-1))


VARIANTS = ("parallel", "causal", "sequential")
MTP_LM_HEADS = ("shared", "own")
_KEYS = ("num_heads", "variant", "lm_head", "hidden_first", "block", "hidden_size", "vocab_size")


class MtpHeads(nn.Module, Heads):
    """K heads of one layer each; their contract is :class:`specheads.models.kinds.Heads`.

    ``contextual`` runs the layers over whole texts.

    Args:
        num_heads: K.
        config: of one layer, see :func:`block_config`.
        vocab_size: V of the base model.
        variant: ``parallel``, ``causal`` or ``sequential``.
        lm_head: ``shared``, the base's output matrix, or ``own``, one per head.
        hidden_first: sequential: ``[hidden; embedding]`` as the paper has it, and not
            ``[embedding; hidden]`` as Megatron, transformers and vLLM do.

    Raises:
        ValueError: for an unknown variant or output matrix, or numbers out of range.
    """

    kind = "mtp"
    config_keys: ClassVar[tuple[str, ...]] = (*_KEYS[:3], *_KEYS[4:])  # hidden_first may be missing
    stored: ClassVar[tuple[str, ...]] = _KEYS
    unseen_settings: ClassVar[tuple[str, ...]] = ("variant", "hidden_first")
    tensor_prefix: ClassVar[str] = "mtp."
    token_map: Tensor | None  # a buffer
    num_layers = 0  # what ``features`` would run: ``contextual`` has run all

    def __init__(
        self,
        num_heads: int,
        config: PreTrainedConfig,
        vocab_size: int,
        *,
        variant: str = "parallel",
        lm_head: str = "shared",
        hidden_first: bool = False,
    ) -> None:
        super().__init__()
        one_of("variant", variant, *VARIANTS)
        one_of("lm_head", lm_head, *MTP_LM_HEADS)
        self.take_sizes(num_heads, int(config.hidden_size), vocab_size, lm_head)
        self.variant, self.hidden_first = variant, hidden_first
        self.one_matrix, self.sequential = lm_head == "shared", variant == "sequential"
        self.needs_embedding = self.walks_text = self.sequential
        self.taps = (FINAL,) if self.sequential else (TRUNK,)
        self.config = config = copy.deepcopy(config)
        like = decoder_like(config)
        outputs = vocab_size if lm_head == "own" else 0
        self.layers = nn.ModuleList(
            MtpLayer(like, config, sequential=self.sequential, own_outputs=outputs)
            for _ in range(num_heads)
        )
        self.rotary_emb = type(like.rotary_emb)(config=config)
        for module in self.layers.modules():
            like._init_weights(module)
        self._kept = Kept()
        self._checked = False  # whether a LayerCache was seen to compute what the layers do
        # the same masks in forward and backward; without dropout nothing is drawn
        self._draws = any(value for key, value in vars(config).items() if "drop" in key)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MtpHeads:
        """Move or cast everything but the rotary table, which would be rounded: it only moves."""
        tables = dict(self.rotary_emb.named_buffers())
        super()._apply(fn, recurse)
        for name, table in tables.items():
            moved = self.rotary_emb.get_buffer(name)
            setattr(self.rotary_emb, name, table if moved.is_meta else table.to(moved.device))
        return self

    @classmethod
    def from_settings(cls, settings: MtpConfig, base: PreTrainedModel, output: OutputLayer) -> Self:
        """Build the heads that the section ``mtp`` of a recipe's settings describes.

        ``settings.num_heads`` counts the base's own head, as the paper does: one less is built.

        Raises:
            ValueError: as the class does.
        """
        return cls(
            settings.num_heads - 1,
            block_config(base.config),
            output.weight.shape[0],
            variant=settings.variant,
            lm_head=settings.lm_head,
            hidden_first=settings.hidden_first,
        )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MtpHeads:
        """Build the heads that an export's config.json describes.

        Raises:
            ValueError: if there are no such heads.
        """
        sizes = {key: config[key] for key in ("num_heads", "vocab_size", "variant", "lm_head")}
        first = bool(config.get("hidden_first"))
        with one_line("block"):
            heads = cls(config=config_from_json(config["block"]), hidden_first=first, **sizes)
        if heads.hidden_size != config.get("hidden_size", heads.hidden_size):
            raise ValueError(
                f"block.hidden_size is {heads.hidden_size}, hidden_size {config['hidden_size']}"
            )
        return heads

    def make_tables(self) -> None:
        """Compute the rotary table, which no file holds."""
        self.rotary_emb = type(self.rotary_emb)(config=self.config)

    @property
    def block(self) -> dict[str, Any]:
        """The config of one layer as plain JSON."""
        values = self.config.to_diff_dict()
        dropped = ("transformers_version", "architectures", "dtype", "_name_or_path")
        return {key: value for key, value in values.items() if key not in dropped}

    def layer(self, i: int) -> MtpLayer:
        """Return the layer of head ``i``."""
        return cast(MtpLayer, self.layers[i])

    def waves(self, hidden: Tensor, position_ids: Tensor) -> Any:
        """Return what the layers turn queries and keys by, as the base makes it for its last one.

        Args:
            hidden: any tensor of the device and dtype in question.
            position_ids: [B, T].
        """
        if hasattr(self.rotary_emb, "inv_freq"):
            return self.rotary_emb(hidden, position_ids)
        # Gemma 3 has a table for each type of layer
        return self.rotary_emb(hidden, position_ids, self.config.layer_types[0])

    @torch.no_grad()
    def init_from_base(self, base: PreTrainedModel) -> None:
        """Make every head a copy of the base's last layer and final norm, dequantised.

        So parallel heads start by predicting what the base predicts, causal ones repeat the layer,
        and sequential ones pass the hidden state through it, ignoring the token.

        Raises:
            ValueError: if the base's last layer has other tensors than these.
        """
        with whole(layers_of(base)[-1]):
            state = plain_copy(layers_of(base)[-1], base.dtype).state_dict()
        norm = final_norm(base).state_dict()
        matrix = cast(Tensor, base.get_output_embeddings().weight)
        for layer in map(self.layer, range(self.num_heads)):
            with one_line("the base's last layer is of another kind"):
                layer.block.load_state_dict(state)
                layer.norm.load_state_dict(norm)
            if layer.eh_proj is not None:
                size, first = self.hidden_size, 0 if self.hidden_first else self.hidden_size
                layer.eh_proj.weight.zero_()
                layer.eh_proj.weight[:, first : first + size].copy_(torch.eye(size))
            if layer.lm_head is not None:
                layer.lm_head.weight.copy_(matrix)

    def contextual(
        self, hidden: Tensor, position_ids: Tensor, tokens: Tensor | None = None
    ) -> Tensor:
        """Return what the output matrices read, [K, B, T, d]: one head's layer behind the other.

        Each layer's inner activations are made again in backward, so that those of one layer exist
        at a time.

        Args:
            hidden: [B, T, d], at :attr:`tap`, of whole documents, several in a row if packed.
            position_ids: [B, T], restarting at 0 with every document.
            tokens: [B, T], for sequential heads: the texts. Head i reads the token i + 1 ahead;
                near the end of a document that is another document's, where the head has no label.
        """
        weight = next(self.parameters())
        hidden = hidden.to(weight.dtype)
        # packed documents apart, as transformers would make it
        masks = create_masks_for_generate(self.config, hidden, None, None, position_ids)
        mask = next(iter(masks.values())) if isinstance(masks, dict) else masks
        waves = self.waves(hidden, position_ids)
        embedded = None
        if self.sequential:
            embedded = given(self.embed, "embed")(given(tokens, "tokens")).to(weight.dtype)

        def run(i: int, source: Tensor) -> tuple[Tensor, Tensor]:
            # rolled in here, so that no head's shifted copy is kept for backward
            ahead = None if embedded is None else embedded.roll(-1 - i, dims=1)
            return self.attend(i, source, ahead, mask, position_ids, waves)

        found, before = [], hidden
        for i in range(self.num_heads):
            source = hidden if self.variant == "parallel" else before
            before, output = checkpoint(  # where no gradient is wanted, this is a plain call
                run, i, source, use_reentrant=False, preserve_rng_state=self._draws
            )
            found.append(output)
        return torch.stack(found)

    def attend(
        self,
        i: int,
        hidden: Tensor,
        embedded: Tensor | None,
        mask: Tensor | None,
        position_ids: Tensor,
        waves: Any,
        cache: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the layer of head ``i``.

        Args:
            i: the head.
            hidden: [B, T, d], the trunk, or what the head before made.
            embedded: [B, T, d], of sequential heads: embeddings of the tokens that they read.
            mask: as transformers makes it, or what the layer adds to its scores, [B, 1, T, L].
            position_ids: [B, T].
            waves: of these positions, see :meth:`waves`.
            cache: takes the layer's keys and values and gives back those to look at.

        Returns:
            What the next head reads, and what this one's output matrix reads, [B, T, d] each.
        """
        layer = self.layer(i)
        if embedded is not None:
            hidden = layer.join(hidden, embedded, hidden_first=self.hidden_first)
        found = layer.block(
            hidden,
            attention_mask=mask,
            position_ids=position_ids,
            position_embeddings=waves,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        found = found[0] if isinstance(found, tuple) else found
        output = layer.norm(found)
        return (output if self.sequential else found), output

    def output_weight(self, i: int, base_weight: Tensor) -> Tensor:
        """Return the output matrix [V, d] of head ``i``."""
        own = self.layer(i).lm_head
        return base_weight if own is None else own.weight

    def memory(self, num_rows: int) -> LayerCache | TextCache:
        """Return what the layers remember of texts while decoding, before anything was read.

        Args:
            num_rows: texts.

        Raises:
            ValueError: if the layers' attention is of a kind that cannot draft.
        """
        if self.sequential:
            root = next(self.parameters()).new_zeros(self.num_heads, num_rows, self.hidden_size)

            def table(capacity: int) -> Any:
                return self.waves(root, torch.arange(capacity, device=root.device)[None])

            slots, lengths = Slots(self.num_heads, table), (0,) * num_rows
            return TextCache(slots, lengths, root, self, self._window())
        layers = [(each.block, each.norm) for each in map(self.layer, range(self.num_heads))]
        groups = [layers] if self.variant == "parallel" else [[each] for each in layers]
        window = attention_of(self.config)[1]
        empty = partial(LayerCache.empty, self, groups, self.rotary_emb, window=window)
        if not self._checked:
            problem = odd_part(self.config, layers[0][0])
            if problem is None:
                with undisturbed(self):  # no dropout
                    problem = odd_numbers(self.contextual, empty, self.hidden_size)
            if problem:
                raise ConfigError(
                    f"MTP heads of variant {self.variant} cannot decode with layers of model_type"
                    f" {self.config.model_type}: {problem}; layers like those of llama, qwen3 and"
                    " mistral are known"
                )
            self._checked = True
        return empty(num_rows)

    def steps(self, output: OutputLayer, depth: int) -> Callable[[], Begin]:
        """Return a function that returns how the heads begin a step.

        Raises:
            ValueError: for heads that are not sequential, or if the layers' attention is neither
                full nor that of a sliding window.
        """
        if not self.sequential:
            raise ValueError("these heads are parallel: they need not be asked level by level")
        self._window()

        @torch.no_grad()
        def refresh() -> Begin:
            # nodes are a slice of a level's, which torch would multiply by copying the matrix
            weight = output.weight
            shared = self._kept.of([weight], partial(product, weight)) if self.one_matrix else None

            def logits(i: int, made: Tensor) -> Tensor:
                if shared is not None:
                    return self.finish(shared(made), output)
                own = cast(nn.Linear, self.layer(i).lm_head)
                return self.finish(own(made.to(own.weight.dtype)), output)

            return partial(MtpWalk, logits)

        return refresh

    def _window(self) -> int | None:
        """Return how many tokens a layer looks back upon, itself included; None for all."""
        kind, window = attention_of(self.config)
        one_of("attention of sequential MTP heads", kind, *head_cache.WINDOWED)
        return window


@dataclass(frozen=True)
class TextCache(head_cache.RootCache):
    """What modules that read tokens remember of every row, as it is after :meth:`append`.

    A row's length is the position of its root, whose token the modules have read: ``root`` is G^k
    there, [K, B, d]; where the text is too short for it, anything finite.

    Attributes:
        heads: whose.
        window: how many tokens a layer looks back upon, itself included; None for all.
    """

    heads: MtpHeads
    window: int | None

    def append(self, hidden: Tensor, counts: Sequence[int], tokens: Tensor) -> tuple[Self, Tensor]:
        """Read on.

        Args:
            hidden: [B, T, d], the base's final hidden states of the positions that follow,
                right-padded.
            counts: per row how many of the T are real; where it is 0, nothing changes.
            tokens: [B, T], the token that came after each of them, the root at the last one.

        Returns:
            The cache with them, and G^k at each row's root, [K, B, d].
        """
        cache, _ = self.read(hidden, counts, tokens)
        return cache, cache.root

    @torch.no_grad()
    def read(self, hidden: Tensor, counts: Sequence[int], tokens: Tensor) -> tuple[Self, Tensor]:
        """Do what :meth:`append` does; return G^k at every new token, [K, B, T, d]."""
        device = self.ends.device
        num_new = tokens.shape[1]
        seen = self.slots.reserve(self.lengths, num_new)
        places = self.ends[:, None] + torch.arange(num_new, device=device)  # [B, T]
        allowed = head_cache.visible(places, seen, self.window)  # [B, T, L]
        mask = additive(allowed, self.root.dtype)
        waves = _at(self.slots.waves, places)
        embedded = given(self.heads.embed, "embed")(tokens).to(self.root.dtype)
        before = hidden.to(self.root.dtype)
        found: list[Tensor] = []
        for i in range(len(self.root)):
            if i:
                # what was before the first token of this module is no part of it
                hide(mask[:, 0, :, i - 1], places >= i)
                # one position back: at the first of these tokens that is the root until now
                before = torch.cat([self.root[i - 1, :, None], found[-1][:, :-1]], dim=1)
            layer = self.slots.layers[i]
            found.append(self.heads.attend(i, before, embedded, mask, places, waves, layer)[1])
        every = torch.stack(found)
        last = head_cache.last_places(counts, device)[:, 0]
        root = every[:, torch.arange(len(counts), device=device), last]
        return self.moved(counts, root), every


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask [B, 1, T, L] that layers add to their scores, of bools [B, T, L]."""
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return hide(zeros, ~allowed)[:, None]


def hide(mask: Tensor, which: Tensor) -> Tensor:
    """Mask more of an additive mask, in place."""
    return mask.masked_fill_(which, torch.finfo(mask.dtype).min)


class MtpWalk(head_cache.RootWalk):
    """One step's way down the tree.

    Args:
        logits: maps a module's number and what the module makes [B, n, d] to logits [B, n, V].
        hidden: [K, B, d], what the modules make of the roots.
        root: [B], the last certain tokens.
        memory: of the texts up to there.
    """

    _memory: TextCache

    def __init__(
        self, logits: Callable[..., Tensor], hidden: Tensor, root: Tensor, memory: TextCache
    ) -> None:
        super().__init__(root, memory)
        self._logits, self._hidden = logits, hidden
        self._made = hidden[0][:, None]  # [B, 1 + N, d], of this level's module, root first
        # of all nodes but the root
        self._embedded = hidden.new_zeros(len(root), 0, hidden.shape[-1])
        self._above = root.new_zeros(len(root), 0)  # [B, N], places of parents, 0 the root
        self._depths: list[int] = []
        self._every = self._lines[:, :0]  # [B, N, N], the lines of all levels

    def logits(self) -> Tensor:
        """Return what the module of this level says at its nodes, [B, n, V]."""
        return self._logits(self.depth, self._made[:, -self.tokens.shape[1] :])

    def descend(self, tokens: Tensor, parents: Tensor) -> None:
        """Go to nodes one deeper.

        Args:
            tokens: [B, n'], the tokens of these nodes.
            parents: the places of their parents among the n nodes at hand, [n'] where all rows
                share them, else [B, n'].
        """
        first, num_new = self._made.shape[1] - self.tokens.shape[1], tokens.shape[1]
        above = first + self.go_to(tokens, parents)
        self._every = torch.cat([F.pad(self._every, (0, num_new)), self._lines], dim=1)
        self._above = torch.cat([self._above, above], dim=1)
        embedded = given(self._memory.heads.embed, "embed")(tokens).to(self._made.dtype)
        self._embedded = torch.cat([self._embedded, embedded], dim=1)
        self._depths += [self.depth] * num_new
        self._made = torch.cat([self._hidden[self.depth][:, None], self._run(self.depth)], dim=1)

    def _run(self, module: int) -> Tensor:
        """Return what a module makes of all nodes but the root, [B, N, d]."""
        memory, num_nodes = self._memory, len(self._depths)
        num_slots = memory.slots.reserve(memory.lengths, num_nodes)
        depths = torch.tensor(self._depths, device=memory.ends.device)
        places = memory.ends[:, None] - 1 + depths  # [B, N], slots that they would have if certain
        slots = torch.arange(num_slots, device=places.device)
        certain = head_cache.visible(places, num_slots, memory.window)
        # module k has nothing in its first k slots, but in short texts it begins in the tree
        certain &= ((slots >= module) & (slots < memory.ends[:, None]))[:, None]
        itself = torch.eye(num_nodes, dtype=torch.bool, device=places.device)
        lines = self._every & ((places >= module)[:, None] | itself)
        if memory.window is not None:
            lines &= depths[:, None] - depths < memory.window
        mask = additive(self.seen(certain, lines), memory.root.dtype)
        waves, layer = _at(memory.slots.waves, places), memory.slots.layers[module]
        before = head_cache.rows_at(self._made, self._above)
        asked = module, before, self._embedded, mask, places, waves, layer
        return memory.heads.attend(*asked)[1]


def _at(waves: Any, places: Tensor) -> Any:
    """Return the position embeddings [B, T, ...] of the slots ``places`` [B, T]."""
    return tuple(w[0, places] for w in waves) if isinstance(waves, tuple) else waves[0, places]
