"""Our heads as a class that vLLM imports by name, its method ``custom_class``.

``vllm serve BASE --speculative-config '{"method": "custom_class", "model":
"specheads.vllm_heads.HeadsProposer", "num_speculative_tokens": 4}' --additional-config
'{"specheads": {"heads": "EXPORT"}}'``, in an environment where both packages are installed; the
command that writes an export prints it. vLLM hands the class its model once it is loaded, and calls
``propose`` after every step. The heads guess a chain from the hidden states that the model's
forward pass returned, which a hook on that pass keeps; vLLM verifies the chain with its own
sampler, so what is proposed changes its speed and never its output.

Where a request's hidden states were not seen the class proposes nothing for it, or guesses from
what it saw, and counts how often.

Written for vLLM 0.32 and 0.33, its first model runner, on one device. Nothing of vLLM is imported
before a model is there.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from specheads.attention.tree import Tree
from specheads.config import ConfigError
from specheads.drafters.heads import HeadsDrafter, HeadsState
from specheads.models.checkpoint import load_heads, placed, read_config
from specheads.models.kinds import HeadCache
from specheads.models.names import base_digest
from specheads.models.output import FINAL, LAYER, TRUNK, OutputLayer, side_by_side
from specheads.vllm_proposer import TextStates, read_rows

KEY = "specheads"  # of vLLM's --additional-config
UNSEEN = (
    "the pass was not seen: it is one graph (cudagraph_mode=PIECEWISE shows it), or its attention"
    " backend gives no query_start_loc"
)
PAST = "begun without their past"  # counted, beside why nothing was proposed
logger = logging.getLogger("vllm.specheads")  # below vLLM's own, so that its handlers print it


@dataclass(frozen=True)
class Seen:
    """What the base model's last pass read.

    Attributes:
        starts: [rows + 1], where in it each request's tokens begin.
        positions: of its tokens, in their texts.
        hidden: [tokens, ...], at the heads' taps, side by side.
    """

    starts: list[int]
    positions: list[int]
    hidden: Tensor


class HeadsProposer:
    """Proposes the chain of the heads' best guesses.

    Args:
        vllm_config: vLLM's settings. Its ``additional_config`` names the export, ``{"specheads":
            {"heads": folder}}``; with ``"other_base": true`` a base of other weights is taken.

    Attributes:
        counts: ``steps``, ``rows`` that could be guessed for, ``proposed`` tokens, and how often
            nothing was proposed, by the reason.

    Raises:
        ConfigError: one line, if the export is not named, not whole, made for another base model,
            or has fewer heads than tokens are asked for; if vLLM runs on several devices.
    """

    def __init__(self, vllm_config: Any) -> None:
        given = _given(vllm_config)
        self.num_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self.max_length = int(vllm_config.model_config.max_model_len)
        self.counts: Counter[str] = Counter()
        parallel = vllm_config.parallel_config
        if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
            raise ConfigError("heads of specheads run on one device, not under tensor or pipeline"
                              " parallelism")  # fmt: skip
        folder = str(given["heads"])
        _check_base(read_config(folder), vllm_config.model_config, bool(given.get("other_base")))
        self._heads = load_heads(folder)
        if self._heads.num_heads < self.num_tokens:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_tokens}, {folder} has"
                f" {self._heads.num_heads} heads"
            )
        self._states: TextStates[HeadCache] = TextStates()
        self._seen: Seen | None = None

    def load_model(self, target: nn.Module) -> None:
        """Take the base model's matrices, and keep what its passes return from now on."""
        base: Any = target
        matrix = base.lm_head.weight
        heads = placed(self._heads, matrix.device, matrix.dtype).requires_grad_(False)
        output = _output_layer(base, heads.vocab_size, heads.hidden_size)

        def embed(tokens: Tensor) -> Tensor:
            return base.embed_input_ids(tokens.flatten()).view(*tokens.shape, -1)

        heads.embed = embed if heads.needs_embedding else None
        self._drafter = HeadsDrafter(heads, output, Tree.chain(self.num_tokens))
        self._predict = self._drafter.steps()
        self._remembers = heads.memory(1) is not None
        ids = {tap: _layer_id(tap, base) for tap in heads.taps if tap != FINAL}
        if ids:
            base.set_aux_hidden_state_layers(tuple(sorted(ids.values())))
        self._order = {tap: sorted(ids.values()).index(place) for tap, place in ids.items()}
        target.register_forward_hook(self._watch, with_kwargs=True)

    def _watch(
        self, _module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> Any:
        """Keep what a pass returned, and return of it what vLLM expects: the final states."""
        from vllm.forward_context import get_forward_context

        final, others = (output[0], output[1]) if self._order else (output, [])
        about = get_forward_context().attn_metadata
        about = next(iter(about.values()), None) if isinstance(about, dict) else None
        starts = getattr(about, "query_start_loc", None)
        positions = kwargs["positions"] if "positions" in kwargs else args[1]
        self._seen = None
        if starts is not None:
            taken = {tap: others[place] for tap, place in self._order.items()} | {FINAL: final}
            hidden = side_by_side(taken, self._heads.taps)
            self._seen = Seen(starts.tolist(), positions.tolist(), hidden)
        return final

    @torch.inference_mode()
    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: ArrayLike,
        token_ids_cpu: ArrayLike,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return a chain of guesses per row, empty where there is none."""
        del slot_mappings
        found: list[list[int]] = [[] for _ in sampled_token_ids]
        read_rows(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)  # checks the call
        seen, self._seen = self._seen, None
        self.counts["steps"] += 1
        if seen is None or len(seen.starts) <= len(found):
            self._count(UNSEEN, len(found))
            return found
        lengths, ids = np.asarray(num_tokens_no_spec), np.asarray(token_ids_cpu)
        ready: dict[int, HeadsState] = {}
        for row, sampled in enumerate(sampled_token_ids):
            text = ids[row, : int(lengths[row])].astype(np.int64)
            state = self._read(row, text, seen)
            if state is not None and sampled:
                ready[row] = state
        self._states.forget(len(found))
        together = [list(ready)] if ready and not self._remembers else [[row] for row in ready]
        for rows in together:
            joined = reduce(self._drafter.join, map(ready.__getitem__, rows))
            guesses = self._drafter.propose(joined).tokens[:, 1:].tolist()
            for row, guessed in zip(rows, guesses, strict=True):
                # the step that verifies the guesses adds a token of its own
                room = max(min(self.num_tokens, self.max_length - int(lengths[row]) - 1), 0)
                found[row] = guessed[:room]
        self.counts["rows"] += len(ready)
        self.counts["proposed"] += sum(map(len, found))
        return found

    def _read(self, row: int, text: Any, seen: Seen) -> HeadsState | None:
        """Read on in a row's text, guesses that were refused left out."""
        begin, end = seen.starts[row : row + 2]
        first = seen.positions[begin] if begin < end else 0
        count = min(end - begin, len(text) - 1 - first)
        if count < 1:
            self._count("nothing of the text was read", 1)
            return None
        hidden, memory = seen.hidden[begin : begin + count], None
        last = hidden[-1:]
        if self._remembers:
            memory = self._states.take(text[:first])
            if memory is None:
                memory = self._heads.memory(1)
                self.counts[PAST] += first > 0
            assert memory is not None
            ahead = torch.from_numpy(text[first + 1 : first + count + 1])[None].to(hidden.device)
            memory, last = memory.append(hidden[None], [count], ahead)
            self._states.keep(text[: first + count], memory)
        root = torch.tensor([int(text[-1])], device=last.device)
        return HeadsState(root, last, self._predict, memory)

    def _count(self, reason: str, rows: int) -> None:
        """Count rows for which nothing is proposed; say so the first time, and ever more rarely."""
        before = self.counts[reason]
        self.counts[reason] += rows
        if before.bit_length() < self.counts[reason].bit_length():
            logger.warning("no guesses for %d rows so far: %s", self.counts[reason], reason)


def _given(vllm_config: Any) -> Mapping[str, Any]:
    """Return what vLLM's ``--additional-config`` says to us."""
    given = getattr(vllm_config, "additional_config", None)
    given = given.get(KEY) if isinstance(given, dict) else None
    if not isinstance(given, dict) or not given.get("heads"):
        example = json.dumps({KEY: {"heads": "FOLDER"}})
        raise ConfigError(f"the heads are not named: add --additional-config '{example}'")
    return given


def _check_base(config: Mapping[str, Any], model: Any, other_base: bool) -> None:
    """Refuse heads of another base model than vLLM was started with."""
    trained, name = config["base"], str(model.model)
    if other_base or trained["tuned"] or not trained["digest"]:
        return  # a tuned base lies in the export, where the command names it
    if base_digest(name, revision=getattr(model, "revision", None)) != trained["digest"]:
        raise ConfigError(
            f"{name} has other weights than {trained['name']}, on which the heads were trained:"
            f' they would guess worse; "other_base": true beside "heads" takes them'
        )


def _output_layer(base: Any, vocab_size: int, hidden_size: int) -> OutputLayer:
    """Return the base's output layer, without the rows that vLLM pads its matrix with."""
    matrix, processor = base.lm_head.weight, base.logits_processor
    if matrix.shape[0] < vocab_size or matrix.shape[1] != hidden_size:
        raise ConfigError(
            f"the base's output matrix is {list(matrix.shape)}, the heads need"
            f" [{vocab_size}, {hidden_size}]"
        )
    bias = getattr(base.lm_head, "bias", None)
    layer = nn.Linear(hidden_size, vocab_size, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(matrix[:vocab_size], requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias[:vocab_size], requires_grad=False)
    return OutputLayer(layer, float(processor.scale), processor.soft_cap)


def _layer_id(tap: str, base: Any) -> int:
    """Return after how many layers of vLLM's model a tap's hidden states are there.

    Raises:
        ConfigError: if vLLM's class of the model gives none but the last ones.
    """
    if not hasattr(base, "set_aux_hidden_state_layers"):
        raise ConfigError(
            f"the heads read {tap}, and vLLM's {type(base).__name__} gives no hidden states between"
            " its layers"
        )
    if tap == TRUNK:
        return int(base.config.num_hidden_layers) - 1
    return int(tap.removeprefix(LAYER)) + 1
