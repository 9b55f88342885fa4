"""Drafters and models for the decoding tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specheads.drafters.contract import FINAL, Candidates, StepResult
from specheads.tree import Tree

VOCAB = 64

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,  # tied ones repeat themselves
}

# name -> model type, changes to SMALL, attention
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {}, "sdpa"),
    "llama-eager": ("llama", {}, "eager"),
    "mistral-window": ("mistral", {"sliding_window": 6}, "sdpa"),
    "gemma2": ("gemma2", {"sliding_window": 6, "query_pre_attn_scalar": 8}, "eager"),
    "gpt2": ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256}, "sdpa"),
}


def build(name: str, redraw: Callable[..., None], std: float = 0.3) -> PreTrainedModel:
    """Build a small random model of MODELS whose logits depend on everything."""
    model_type, changes, attention = MODELS[name]
    known = CONFIG_MAPPING[model_type]()
    settings = {key: value for key, value in SMALL.items() if hasattr(known, key)} | changes
    config = CONFIG_MAPPING[model_type](**settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    redraw(model, std=std, seed=1)
    assert isinstance(model, PreTrainedModel)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if ".ln_" in parameter_name:  # GPT-2's norms
                parameter.fill_(float(parameter_name.endswith("weight")))
    return model.eval()


class ScriptedDrafter:
    """Knows the true continuation and puts it into a share of its guesses.

    Args:
        tree: static.
        truth: prompt and continuation.
        hit_rate: how often a node of rank 0 is right; nodes of other ranks are right the rest of
            the time, and may then be equal siblings.
    """

    taps = (FINAL,)
    deterministic = True

    def __init__(self, tree: Tree, truth: list[int], hit_rate: float, vocab: int = VOCAB) -> None:
        self.tree, self.truth, self.hit_rate, self.vocab = tree, truth, hit_rate, vocab
        self.generator = torch.Generator().manual_seed(0)

    def start(
        self, prompt_ids: Tensor, hidden: Mapping[str, Tensor], root: Tensor
    ) -> tuple[int, int]:
        """Check the hidden states' shape; remember the root and its position."""
        assert hidden[FINAL].shape[:2] == prompt_ids.shape
        return prompt_ids.shape[1], int(root)

    def propose(self, state: tuple[int, int]) -> Candidates:
        """Guess."""
        position, root = state
        tokens = [root]
        for depth, rank in zip(self.tree.depths[1:], self.tree.ranks[1:], strict=True):
            i = position + int(depth)
            right = self.truth[i] if i < len(self.truth) else 0
            hit = bool(torch.rand((), generator=self.generator) < self.hit_rate)
            good = hit if int(rank) == 0 else (not hit and 0 < self.hit_rate < 1)
            tokens.append(right if good else (right + 1 + int(rank)) % self.vocab)
        return Candidates(torch.tensor([tokens]), self.tree)

    def observe(self, state: tuple[int, int], result: StepResult) -> tuple[int, int]:
        """Move on."""
        assert result.hidden[FINAL].shape[:2] == result.tokens.shape
        return state[0] + len(result.new_tokens[0]), int(result.next_root)
