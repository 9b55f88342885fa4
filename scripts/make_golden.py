"""Make the golden checkpoint of the tests, or pin what it decodes anew.

    python scripts/make_golden.py          # train, export to tests/golden/export, pin
    python scripts/make_golden.py --pin    # keep the weights, write tests/golden/expected.json

A model of two layers learns the embedded calibration prompts by heart as far as it can, heads are
trained on it, and what they decode is pinned: tokens and accept lengths. Training is seeded, but
another processor may round to other weights; what is pinned belongs to the weights in the
repository. A prompt is pinned only where every choice is clear, of the base model and among the
heads' guesses, so that another processor's rounding changes nothing.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import harness
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from specheads.attention.tree import Tree
from specheads.config.training import LossConfig
from specheads.decoding.loop import decode, plain_decode
from specheads.decoding.result import DecodeResult
from specheads.drafters.heads import Draws, HeadsDrafter
from specheads.drafters.lookup import NgramDrafter
from specheads.models.base import load_tokenizer
from specheads.models.checkpoint import Export, load_export, save_export
from specheads.models.heads import MedusaHeads
from specheads.models.output import output_layer
from specheads.training.objectives import HeadsObjective
from specheads.verification.sampling import Sampler
from tests.ragged import padded

GOLDEN = harness.ROOT / "tests" / "golden"
TEXT = harness.ROOT / "data" / "tinycode" / "calibration.jsonl"
NUM_HEADS = 4
TREE = Tree.from_choices(
    [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 0, 0, 0)]
)
# logits of a processor with other instructions differ by 1e-5 of the largest at most
CLEAR_CHOICE, CLEAR_GUESS = 5e-3, 5e-4
ACCEPTED = 1.6  # a row whose guesses fail anyway would not notice that they fail
CASES = (  # name, drafter, temperature, rows
    ("greedy", "heads", 0.0, 1),
    ("sampled", "heads", 0.8, 1),
    ("batch", "heads", 0.0, 3),
    ("batch_sampled", "heads", 0.8, 3),
    ("lookup", "lookup", 0.0, 1),
)
NEW_TOKENS, SEED = 48, 7


@dataclass
class Settings:
    """What is made.

    Attributes:
        pin: keep the weights
    """

    pin: bool = False
    out: Path = GOLDEN
    steps: int = 1500


def records() -> list[dict[str, Any]]:
    """Return the embedded calibration prompts."""
    return [json.loads(line) for line in TEXT.read_text(encoding="utf-8").splitlines()]


def cases() -> list[dict[str, Any]]:
    """Return what is pinned."""
    found: list[dict[str, Any]] = json.loads((GOLDEN / "expected.json").read_text())["cases"]
    return found


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
        batch = harness.batch_of(stream[starts[:, None] + torch.arange(length)])
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
    tokenizer = load_tokenizer("tinycode")
    sizes = {"intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 1024, "tie_word_embeddings": True}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        sizes[name] = getattr(tokenizer, name)
    base = harness.llama(len(tokenizer), 64, 2, **sizes)
    texts = [render(tokenizer, record["messages"]) for record in records()]
    heads = MedusaHeads(NUM_HEADS, 1, base.config.hidden_size, base.config.vocab_size, "shared")
    # together: the states of so small a model foresee nothing unless the heads ask for it
    train(HeadsObjective(base, heads, LossConfig(lambda_0=0.5), train_base=True), texts, steps)
    base.eval()
    training = {"recipe": "scripts/make_golden.py", "steps": steps}
    info = {"base": {"name": "golden", "digest": "none"}, "training": training}
    save_export(path, heads, tokenizer, TREE, info, tuned_base=base, dtype="bfloat16")


def make_drafter(export: Export, name: str) -> HeadsDrafter | NgramDrafter:
    """Return the drafter of a case: ``heads`` or ``lookup``."""
    return NgramDrafter() if name == "lookup" else harness.tree_drafter(export)


def request(export: Export, case: dict[str, Any]) -> dict[str, Any]:
    """Return how a case is decoded: its prompts, left-padded, and its settings."""
    given = padded([torch.tensor([prompt]) for prompt in case["prompts"]])
    return {
        **{key: value.to(export.base.device) for key, value in given.items()},
        "max_new_tokens": case["max_new_tokens"],
        "sampler": Sampler(temperature=case["temperature"], seed=case["seed"]),
        "eos_token_ids": [export.tokenizer.eos_token_id],
    }


def decode_case(export: Export, case: dict[str, Any], drafter: Any = None) -> DecodeResult:
    """Decode a case of expected.json, with ``drafter`` in place of its own if given."""
    drafter = drafter or make_drafter(export, case["drafter"])
    return decode(export.base, drafter, **request(export, case))


def choice_gap(export: Export, case: dict[str, Any], new: list[int]) -> float:
    """Return how far the closest of the choices was ahead of the second best."""
    (prompt,) = case["prompts"]
    ids = torch.tensor([prompt + new])
    sampler = Sampler(temperature=case["temperature"], seed=case["seed"])
    with torch.no_grad():
        logits = export.base(ids).logits[0, len(prompt) - 1 : -1]
    chain = Tree.chain(len(logits) - 1)
    scores = sampler.tree_scores(logits[None], chain, [len(prompt) - 1])[0]
    best = scores.topk(2, dim=-1)
    assert best.indices[:, 0].tolist() == new
    return float((best.values[:, 0] - best.values[:, 1]).min())


def guess_gap(export: Export, case: dict[str, Any]) -> tuple[DecodeResult, float]:
    """Decode a case by its heads; return the result, and how clearly their guesses were ranked."""
    drafter, gaps = make_drafter(export, "heads"), list[float]()
    predict, follow = export.heads.snapshot(output_layer(export.base)), Draws.follow

    def watch(logits: Tensor) -> Tensor:
        best = logits.topk(TREE.max_rank + 2, dim=-1).values
        gaps.append(float((best[..., :-1] - best[..., 1:]).min()))
        return logits

    # what is ranked: logits as they are, or with the noise of the draws that they follow
    if case["temperature"]:
        watched = patch.object(Draws, "follow", lambda *given: watch(follow(*given)))
    else:
        snapshot = lambda output: lambda hidden: watch(predict(hidden))  # noqa: E731
        watched = patch.object(export.heads, "snapshot", snapshot)
    with watched:
        result = decode_case(export, case, drafter)
    return result, min(gaps)


def pin(export: Export) -> dict[str, Any]:
    """Decode every case from prompts whose choices are clear; return expected.json."""
    users = iter([render(export.tokenizer, record["messages"][:1]) for record in records()])
    done = []
    for name, drafter, temperature, num_rows in CASES:
        about = {"name": name, "drafter": drafter, "temperature": temperature}
        case: dict[str, Any] = {**about, "seed": SEED, "max_new_tokens": NEW_TOKENS, "prompts": []}
        gaps: list[tuple[float, float]] = []
        while len(gaps) < num_rows:
            prompt = next(users)  # row b is sampled with the seed + b
            alone = {**case, "prompts": [prompt], "seed": SEED + len(gaps)}
            result, guess = guess_gap(export, alone)
            choice = choice_gap(export, alone, result.new_tokens)
            is_long = len(result.new_tokens) >= NEW_TOKENS // 2
            is_clear = choice >= CLEAR_CHOICE and guess >= CLEAR_GUESS
            if is_clear and is_long and result.accept_length >= ACCEPTED:
                case["prompts"].append(prompt)
                gaps.append((round(choice, 5), round(guess, 5)))
        case["choice_gaps"], case["guess_gaps"] = (list(each) for each in zip(*gaps, strict=True))
        result = decode_case(export, case)
        plain = plain_decode(export.base, **request(export, case))
        assert torch.equal(plain.sequences, result.sequences)
        assert result.num_replays == 0
        case["new_tokens"] = [row.new_tokens for row in result.rows]
        case["accept_lengths"] = [row.accept_lengths for row in result.rows]
        done.append(case)
        print(f"{name}: accept length {result.accept_length:.2f}, gaps (choices, guesses) {gaps}")
        for row in result.rows:
            print("  ", repr(export.tokenizer.decode(row.new_tokens)))
    return {"made_by": "scripts/make_golden.py", "cases": done}


def main(argv: Sequence[str] | None = None) -> None:
    """Train, pin."""
    given = harness.parse(Settings, argv)
    torch.set_num_threads(1)
    if not given.pin:
        make(given.out / "export", given.steps)
    export = load_export(given.out / "export", dtype="float32", device="cpu")
    text = json.dumps(pin(export), indent=1)
    # innermost lists on one line each
    text = re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found.group().split()), text)
    (given.out / "expected.json").write_text(text + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in given.out.rglob("*") if file.is_file())
    print(f"{given.out}: {size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
