"""A linear language model with heads, scripted batches, and a tiny model whose texts end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    LogConfig,
    LossConfig,
    OptimConfig,
    TrainConfig,
)
from specheads.losses.cross_entropy import IGNORE, shift_labels
from specheads.models.kinds import Heads
from tests.conftest import build_byte_tokenizer, build_tiny_llama

VOCAB_SIZE, HIDDEN_SIZE, NUM_HEADS = 11, 6, 2


class ToyObjective(nn.Module):
    """Embedding, dropout, a matrix for the model and one per head; the loss as the real ones do."""

    num_heads = NUM_HEADS

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.blocks = nn.ModuleList(
            nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE) for _ in range(NUM_HEADS + 1)
        )
        self.lm_head = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE)
        self.dropout = nn.Dropout(dropout)
        self.engine_scale = 1.0
        self.lambda_scale = 1.0
        self.seen_num_valid: list[list[float]] = []

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and its additive metrics."""
        self.seen_num_valid.append(batch["num_valid"].tolist())
        hidden = self.dropout(self.embed(batch["input_ids"]))
        total = hidden.new_zeros(())
        metrics = {}
        for i, block in enumerate(self.blocks):
            labels = shift_labels(batch["labels"], batch["segment_ids"], i + 1)
            logits = self.lm_head(block(hidden)).flatten(0, 1)
            summed = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")
            part = summed / batch["num_valid"][i].clamp_min(1)
            metrics["lm/loss" if i == 0 else f"head_{i - 1}/loss"] = part.detach()
            total = total + 0.8**i * part
        metrics["loss"] = total.detach()
        return total * self.engine_scale, metrics


class ToyBatches:
    """Random rows by position: batch n is the same however it is reached."""

    def __init__(
        self, rows: int = 2, seq_len: int = 12, rank: int = 0, world: int = 1, poison: int = -1
    ) -> None:
        self.rows, self.seq_len, self.rank, self.world = rows, seq_len, rank, world
        self.position = 0
        self.poison = poison

    def make(self, number: int) -> dict[str, Any]:
        """Return batch ``number``."""
        generator = torch.Generator().manual_seed(number)
        shape = (self.rows, self.seq_len)
        ids = torch.randint(0, VOCAB_SIZE, shape, generator=generator)
        labels = ids.clone()
        labels[:, : 1 + number % (self.seq_len - 2)] = IGNORE  # unequal counts
        return {
            "input_ids": ids,
            "labels": labels,
            "position_ids": torch.arange(self.seq_len).expand(shape),
            "segment_ids": torch.ones(shape, dtype=torch.long),
            "ids": [f"record-{number}-{row}" for row in range(self.rows)],
        }

    def __next__(self) -> dict[str, Any]:
        batch = self.make(self.position + self.rank)
        self.position += self.world
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        self.position = state["position"]


def toy_config(run_dir: Path, **changes: Any) -> TrainConfig:
    """Return settings for a short run into ``run_dir``; nested ones as ``optim__lr=1.0``."""
    parts: dict[str, Any] = {
        "data": {"source": "jsonl", "path": "unused.jsonl", "rows": 2, "seq_len": 12},
        "optim": {"lr": 1e-2, "warmup_steps": 2},
        "log": {"every": 2, "wandb": "disabled"},
        "checkpoint": {},
        "loss": {},
        "evaluate": {},
    }
    flat: dict[str, Any] = {"recipe": "toy", "run_dir": str(run_dir), "steps": 8}
    for key, value in changes.items():
        part, _, name = key.partition("__")
        if name:
            parts[part][name] = value
        else:
            flat[key] = value
    return TrainConfig(
        **flat,
        data=DataConfig(**parts["data"]),
        optim=OptimConfig(**parts["optim"]),
        log=LogConfig(**parts["log"]),
        checkpoint=CheckpointConfig(**parts["checkpoint"]),
        loss=LossConfig(**parts["loss"]),
        evaluate=EvaluateConfig(**parts["evaluate"]),
    )


def save_talker(path: Path) -> Path:
    """Write a tiny model with a chat template, most of whose texts end within 40 tokens."""
    model, tokenizer = build_tiny_llama(std=0.2, vocab_size=262), build_byte_tokenizer()
    with torch.no_grad():
        direction = torch.randn(32, generator=torch.Generator().manual_seed(5))
        direction /= direction.norm()
        model.model.embed_tokens.weight += 0.5 * direction  # a part of all hidden states, by which
        model.lm_head.weight[tokenizer.eos_token_id] += 4 * direction  # the end becomes likely
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def full_logits(heads: Heads, logits: Tensor) -> Tensor:
    """Spread logits [..., V'] over the vocabulary, [..., V]; -inf for tokens not guessed."""
    if heads.token_map is None:
        return logits
    full = logits.new_full((*logits.shape[:-1], heads.vocab_size), -torch.inf)
    full[..., heads.token_map] = logits
    return full
