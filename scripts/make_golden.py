"""Make the golden checkpoint of the tests, or pin what it decodes anew.

    python scripts/make_golden.py          # train, export to tests/golden/export, pin
    python scripts/make_golden.py --pin    # keep the weights, write tests/golden/expected.json

A model of two layers learns the embedded calibration prompts by heart as far as it can, heads are
trained on it, and what they decode is pinned: tokens and accept lengths. Training is seeded, but
another processor may round to other weights; what is pinned belongs to the weights in the
repository. A prompt is pinned only where every choice is clear, of the base model and among the
heads' guesses, so that another processor's rounding changes nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from specheads.attention.tree import Tree
from specheads.config.training import LossConfig
from specheads.decoding.loop import decode, plain_decode
from specheads.decoding.result import DecodeResult
from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.heads import HeadsDrafter, HeadsState
from specheads.drafters.lookup import NgramDrafter
from specheads.models.base import load_tokenizer
from specheads.models.checkpoint import Export, load_export, save_export
from specheads.models.heads import MedusaHeads
from specheads.models.output import output_layer
from specheads.training.objectives import HeadsObjective
from specheads.verification.sampling import Sampler

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
TEXT = ROOT / "data" / "tinycode" / "calibration.jsonl"
NUM_HEADS = 4
TREE = Tree.from_choices(
    [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 0, 0, 0)]
)
# logits of a processor with other instructions differ by 1e-5 of the largest at most
CLEAR_CHOICE, CLEAR_GUESS = 5e-3, 5e-4
ACCEPTED = 1.6  # a row whose guesses fail anyway would not notice that they fail
CASES: tuple[dict[str, Any], ...] = (
    {"name": "greedy", "drafter": "heads", "temperature": 0.0, "rows": 1},
    {"name": "sampled", "drafter": "heads", "temperature": 0.8, "rows": 1},
    {"name": "batch", "drafter": "heads", "temperature": 0.0, "rows": 3},
    {"name": "batch_sampled", "drafter": "heads", "temperature": 0.8, "rows": 3},
    {"name": "lookup", "drafter": "lookup", "temperature": 0.0, "rows": 1},
)
NEW_TOKENS, SEED = 48, 7


def records() -> list[dict[str, Any]]:
    """Return the embedded calibration prompts."""
    return [json.loads(line) for line in TEXT.read_text(encoding="utf-8").splitlines()]


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Return the tokens of a conversation; a prompt if the answer is yet to come."""
    open_ended = messages[-1]["role"] == "user"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=open_ended)
    return list(ids["input_ids"])


def train(objective: nn.Module, texts: list[list[int]], steps: int, lr: float = 6e-3) -> None:
    """Train on random stretches of the texts, laid end to end."""
    generator = torch.Generator().manual_seed(0)
    stream = torch.tensor([token for text in texts for token in text])
    trained = list(objective.parameters())
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    rows, length = 16, 128
    for step in range(steps):
        starts = torch.randint(len(stream) - length, (rows,), generator=generator)
        ids = stream[starts[:, None] + torch.arange(length)]
        batch = {
            "input_ids": ids,
            "labels": ids,
            "position_ids": torch.arange(length).expand(rows, -1),
            "segment_ids": torch.ones_like(ids),
        }
        loss, metrics = objective(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            shown = {key: round(float(value), 3) for key, value in metrics.items() if "loss" in key}
            print(f"step {step}: {shown}", flush=True)


def make(path: Path, steps: int) -> None:
    """Train base and heads and export them, rounded to bfloat16 to halve the files."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer("tinycode")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    base = LlamaForCausalLM(config)
    texts = [render(tokenizer, record["messages"]) for record in records()]
    heads = MedusaHeads(NUM_HEADS, 1, config.hidden_size, config.vocab_size, "shared")
    # together: the states of so small a model foresee nothing unless the heads ask for it
    train(HeadsObjective(base, heads, LossConfig(lambda_0=0.5), train_base=True), texts, steps)
    base.eval()
    save_export(
        path,
        heads,
        base_name="golden",
        base_digest="none",
        tokenizer=tokenizer,
        tree=TREE,
        training={"recipe": "scripts/make_golden.py", "steps": steps},
        tuned_base=base,
        dtype="bfloat16",
    )


@dataclass
class Watched:
    """A drafter of heads that notes how clearly its guesses were ranked."""

    drafter: HeadsDrafter
    gaps: list[float] = field(default_factory=list)

    @property
    def taps(self) -> tuple[str, ...]:
        """As the drafter's."""
        return self.drafter.taps

    @property
    def deterministic(self) -> bool:
        """As the drafter's."""
        return self.drafter.deterministic

    def start(self, prefill: Prefill) -> HeadsState:
        """As the drafter does."""
        return self.drafter.start(prefill)

    def propose(self, state: HeadsState) -> Candidates:
        """As the drafter does; the gaps between guesses decide which node holds which."""
        logits = state.predict(state.hidden)
        best = logits.topk(self.drafter.tree.max_rank + 2, dim=-1).values
        self.gaps.append(float((best[..., :-1] - best[..., 1:]).min()))
        return self.drafter.propose(state)

    def observe(self, state: HeadsState, result: StepResult) -> HeadsState:
        """As the drafter does."""
        return self.drafter.observe(state, result)

    def select(self, state: HeadsState, rows: Tensor) -> HeadsState:
        """As the drafter does."""
        return self.drafter.select(state, rows)


def make_drafter(export: Export, name: str) -> HeadsDrafter | NgramDrafter:
    """Return the drafter of a case: ``heads`` or ``lookup``."""
    if name == "lookup":
        return NgramDrafter()
    return HeadsDrafter(export.heads, output_layer(export.base), export.tree)


def batch_of(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return prompts as [B, P], left-padded with 0, and their mask."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def decode_case(export: Export, case: dict[str, Any], drafter: Any = None) -> DecodeResult:
    """Decode a case of expected.json, with ``drafter`` in place of its own if given."""
    ids, mask = batch_of(case["prompts"])
    return decode(
        export.base,
        make_drafter(export, case["drafter"]) if drafter is None else drafter,
        ids,
        attention_mask=mask,
        max_new_tokens=case["max_new_tokens"],
        sampler=Sampler(temperature=case["temperature"], seed=case["seed"]),
        eos_token_ids=[export.tokenizer.eos_token_id],
    )


def choice_gap(export: Export, prompt: list[int], new: list[int], sampler: Sampler) -> float:
    """Return how far the closest of the choices was ahead of the second best."""
    ids = torch.tensor([prompt + new])
    with torch.no_grad():
        logits = export.base(ids).logits[0, len(prompt) - 1 : -1]
    scores = sampler.scores(logits[None], torch.arange(len(prompt), ids.shape[1])[None], [0])[0]
    best = scores.topk(2, dim=-1)
    assert best.indices[:, 0].tolist() == new
    return float((best.values[:, 0] - best.values[:, 1]).min())


def pin(export: Export) -> dict[str, Any]:
    """Decode every case from prompts whose choices are clear; return expected.json."""
    users = [render(export.tokenizer, record["messages"][:1]) for record in records()]
    cases, used = [], 0
    for case in CASES:
        clear: list[tuple[list[int], float, float]] = []
        while len(clear) < case["rows"]:
            prompt, used = users[used], used + 1
            row = len(clear)  # row b is sampled with the seed + b
            alone = {**case, "prompts": [prompt], "max_new_tokens": NEW_TOKENS, "seed": SEED + row}
            sampler = Sampler(temperature=case["temperature"], seed=SEED + row)
            watched = Watched(make_drafter(export, "heads"))
            result = decode_case(export, alone, watched)
            gap = choice_gap(export, prompt, result.new_tokens, sampler)
            is_clear = gap >= CLEAR_CHOICE and min(watched.gaps) >= CLEAR_GUESS
            is_long = len(result.new_tokens) >= NEW_TOKENS // 2
            if is_clear and is_long and result.accept_length >= ACCEPTED:
                clear.append((prompt, gap, min(watched.gaps)))
        done = {
            **{key: case[key] for key in ("name", "drafter", "temperature")},
            "seed": SEED,
            "max_new_tokens": NEW_TOKENS,
            "prompts": [prompt for prompt, _, _ in clear],
            "choice_gaps": [round(gap, 5) for _, gap, _ in clear],
            "guess_gaps": [round(gap, 5) for _, _, gap in clear],
        }
        result = decode_case(export, done)
        ids, mask = batch_of(done["prompts"])
        plain = plain_decode(
            export.base,
            ids,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            sampler=Sampler(temperature=case["temperature"], seed=SEED),
            eos_token_ids=[export.tokenizer.eos_token_id],
        )
        assert torch.equal(plain.sequences, result.sequences)
        assert result.num_replays == 0
        done["new_tokens"] = [row.new_tokens for row in result.rows]
        done["accept_lengths"] = [row.accept_lengths for row in result.rows]
        print(
            f"{case['name']}: accept length {result.accept_length:.2f}, closest choices"
            f" {done['choice_gaps']}, closest guesses {done['guess_gaps']}"
        )
        for row in result.rows:
            print("  ", repr(export.tokenizer.decode(row.new_tokens)))
        cases.append(done)
    return {"made_by": "scripts/make_golden.py", "cases": cases}


def main() -> None:
    """Parse the command line, train, pin."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pin", action="store_true", help="keep the weights")
    parser.add_argument("--out", type=Path, default=GOLDEN)
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = args.out / "export"
    if not args.pin:
        make(path, args.steps)
    expected = pin(load_export(path, dtype="float32", device="cpu"))
    text = json.dumps(expected, indent=1)
    (args.out / "expected.json").write_text(compact(text) + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    print(f"{args.out}: {size / 1000:.0f} kB")


def compact(text: str) -> str:
    """Put innermost lists of a JSON text on one line each."""
    return re.sub(
        r"\[[^\[\]{}]*\]", lambda found: " ".join(found.group().split()), text, flags=re.DOTALL
    )


if __name__ == "__main__":
    main()
