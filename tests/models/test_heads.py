"""Medusa heads: what they are at step 0, what they share, and how their logits are made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from specheads.losses.cross_entropy import IGNORE
from specheads.models.heads import MedusaHeads
from specheads.models.output import FINAL, OutputLayer, capture_hidden, output_layer
from tests.toys import full_logits


def build(
    lm_head: str, num_layers: int = 1, dtype: torch.dtype | None = None, seed: int | None = 0
) -> tuple[MedusaHeads, OutputLayer]:
    """Return three heads (random unless ``seed`` is None) and an output layer with everything."""
    torch.manual_seed(0)
    matrix = nn.Linear(8, 20, dtype=dtype)
    heads = MedusaHeads(3, num_layers, 8, 20, lm_head).to(dtype)
    heads.init_from_output(matrix.weight)
    if seed is not None:
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.normal_(std=0.3)
    return heads, OutputLayer(matrix, scale=0.5, softcap=2.0)


@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_every_head_starts_as_the_base(
    lm_head: str, num_layers: int, make_tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    """A bias left at its default or a matrix not copied starts training from noise."""
    base = make_tiny_llama()
    output = output_layer(base)
    heads = MedusaHeads(4, num_layers, 32, base.config.vocab_size, lm_head)
    heads.init_from_output(output.weight)
    with torch.no_grad(), capture_hidden(base) as captured:
        expected = base(input_ids=torch.arange(12)[None]).logits
        found = heads.logits(captured[FINAL], output)
    assert found.shape == (4, *expected.shape)
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_no_parameter_is_shared() -> None:
    """``[block] * n`` trains one block n times over, and nothing looks wrong until loading."""
    heads, output = build("own", num_layers=2, seed=None)
    parameters = list(heads.parameters())
    assert len(parameters) == 3 * (2 * 2 + 1)
    assert len({p.data_ptr() for p in (*parameters, output.weight)}) == len(parameters) + 1
    before = heads.logits(torch.ones(8), output)
    with torch.no_grad():
        heads.get_parameter("heads.1.blocks.1.bias").add_(1.0)
    changed = (heads.logits(torch.ones(8), output) != before).any(-1)
    assert changed.tolist() == [False, True, False]


def test_blocks_start_at_zero_bias_included() -> None:
    """Zero weights under a random bias are not the identity: step 0 is then not the base."""
    heads, _ = build("shared", num_layers=2, seed=None)
    assert all(bool((parameter == 0).all()) for parameter in heads.parameters())


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_tensor_names(lm_head: str, tmp_path: Path) -> None:
    """Other programs read these names; safetensors refuses tensors that share memory."""
    heads, _ = build(lm_head, num_layers=2)
    expected = {
        f"heads.{i}.blocks.{layer}.{kind}"
        for i in range(3)
        for layer in range(2)
        for kind in ("weight", "bias")
    }
    if lm_head == "own":
        expected |= {f"heads.{i}.lm_head.weight" for i in range(3)}
    assert set(heads.state_dict()) == expected
    save_file(heads.state_dict(), tmp_path / "heads.safetensors")
    again, _ = build(lm_head, num_layers=2, seed=None)
    again.load_state_dict(load_file(tmp_path / "heads.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(heads.parameters(), again.parameters(), strict=1))


@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("num_layers", [0, 2])
@pytest.mark.parametrize("shape", [(8,), (2, 8), (2, 5, 8)])
def test_logits_by_the_definition(lm_head: str, num_layers: int, shape: tuple[int, ...]) -> None:
    """Heads that skip the base's bias, scale or softcap draft from other probabilities."""
    heads, output = build(lm_head, num_layers)
    hidden = torch.randn(shape)
    expected = []
    for i in range(3):
        x = hidden
        for layer in range(num_layers):
            weight = heads.get_parameter(f"heads.{i}.blocks.{layer}.weight")
            bias = heads.get_parameter(f"heads.{i}.blocks.{layer}.bias")
            x = x + F.silu(x @ weight.T + bias)
        matrix = (
            heads.get_parameter(f"heads.{i}.lm_head.weight") if lm_head == "own" else output.weight
        )
        expected.append(2.0 * torch.tanh(0.5 * (x @ matrix.T + output.bias) / 2.0))
    logits = heads.logits(hidden, output)
    torch.testing.assert_close(logits, torch.stack(expected))
    torch.testing.assert_close(heads.snapshot(output)(hidden), logits)


def test_snapshot_of_large_heads_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacking the output matrices of a real model would double its heads' memory unasked."""
    heads, output = build("own")
    monkeypatch.setattr("specheads.models.heads._MAX_STACKED", 10)
    monkeypatch.setattr(torch, "baddbmm", None)
    hidden = torch.randn(2, 8)
    torch.testing.assert_close(heads.snapshot(output)(hidden), heads.logits(hidden, output))


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_heads_and_base_in_different_dtypes(lm_head: str) -> None:
    """Float32 heads are trained on a bfloat16 base; the product must not raise or round them."""
    heads, _ = build(lm_head)
    _, output = build(lm_head, dtype=torch.bfloat16)
    hidden = torch.randn(2, 8).bfloat16()
    logits = heads.logits(hidden, output)
    assert logits.dtype == (torch.float32 if lm_head == "own" else torch.bfloat16)
    torch.testing.assert_close(heads.snapshot(output)(hidden), logits, rtol=2e-2, atol=2e-2)


def test_misuse_names_both_numbers() -> None:
    """A matrix of the wrong vocabulary could otherwise be copied in part."""
    heads, _ = build("own")
    with pytest.raises(ValueError, match=r"must be \(20, 8\), as the heads have it, got \(21, 8\)"):
        heads.init_from_output(torch.zeros(21, 8))
    with pytest.raises(ValueError, match="low_rank, pruned, shared_pruned, got 'tied'"):
        MedusaHeads(3, 1, 8, 20, "tied")
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        MedusaHeads(0, 1, 8, 20)


KINDS: dict[str, dict[str, Any]] = {
    "low_rank": {"lm_head": "low_rank", "rank": 4},
    "pruned": {"lm_head": "pruned", "num_kept": 7},
    "shared_pruned": {"lm_head": "shared_pruned", "num_kept": 7},
    "markov": {"markov_rank": 3},
    "hydra": {"condition": True},
    "hydra_rows": {
        "condition": True,
        "markov_rank": 3,
        "lm_head": "shared_pruned",
        "num_kept": 7,
    },
    "hydra_shared": {"condition": True, "lm_head": "shared"},
    "everything": {"condition": True, "markov_rank": 3, "lm_head": "pruned", "num_kept": 7},
    "low_rank_markov": {"markov_rank": 3, "lm_head": "low_rank", "rank": 4},
}
KEPT = torch.tensor([19, 3, 0, 11, 7, 5, 2])


def build_kind(kind: str, seed: int | None = 0) -> tuple[MedusaHeads, OutputLayer, nn.Embedding]:
    """Return three heads of a kind, an output layer, and an input embedding."""
    torch.manual_seed(0)
    matrix, embed = nn.Linear(8, 20), nn.Embedding(20, 8)
    heads = MedusaHeads(3, 1, 8, 20, **KINDS[kind])
    heads.init_from_output(matrix.weight, KEPT if heads.token_map is not None else None)
    if seed is not None:
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.normal_(std=0.3)
    heads.embed = embed.forward  # the module itself would be a part of the heads
    return heads, OutputLayer(matrix, scale=0.5, softcap=2.0), embed


def by_definition(
    heads: MedusaHeads, output: OutputLayer, embed: nn.Embedding, hidden: Tensor, tokens: list[int]
) -> list[Tensor]:
    """Return the heads' logits [V'] at one hidden state [d], from the formulas alone."""
    names, found = dict(heads.state_dict()), []
    kept = heads.token_map if heads.token_map is not None else torch.arange(20)
    for i in range(heads.num_heads):
        x = hidden
        if heads.condition:
            parts = [embed.weight[t] / embed.weight[t].square().mean().sqrt() for t in tokens]
            weight = names[f"heads.{i}.condition.weight"]
            x = x + weight @ torch.cat(parts[: i + 1]) + names[f"heads.{i}.condition.bias"]
        x = x + F.silu(names[f"heads.{i}.blocks.0.weight"] @ x + names[f"heads.{i}.blocks.0.bias"])
        if heads.lm_head.startswith("shared"):
            logits = output.weight[kept] @ x
        elif heads.lm_head == "low_rank":
            up = names[f"heads.{i}.lm_head.up.weight"]
            logits = up @ (names[f"heads.{i}.lm_head.down.weight"] @ x)
        else:
            logits = names[f"heads.{i}.lm_head.weight"] @ x
        if heads.markov_rank:
            down = names[f"heads.{i}.markov.down.weight"][tokens[i]]
            logits = logits + names[f"heads.{i}.markov.up.weight"] @ down
        assert output.bias is not None
        found.append(2.0 * torch.tanh(0.5 * (logits + output.bias[kept]) / 2.0))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_by_the_definition(kind: str) -> None:
    """A head that reads the wrong one of the drafted tokens still trains, and drafts worse."""
    heads, output, embed = build_kind(kind)
    hidden, tokens = torch.randn(2, 5, 8), torch.randint(0, 20, (2, 5, 4))
    with torch.no_grad():
        logits = heads.logits(hidden, output, tokens)
        for b in range(2):
            for t in range(5):
                expected = by_definition(heads, output, embed, hidden[b, t], tokens[b, t].tolist())
                torch.testing.assert_close(logits[:, b, t], torch.stack(expected))
        for i in range(3):
            alone = heads.features(i, hidden, tokens[..., : i + 1])
            alone = heads.finish(F.linear(alone, heads.output_weight(i, output.weight)), output)
            torch.testing.assert_close(alone, logits[i])
        if not heads.sequential:
            torch.testing.assert_close(heads.snapshot(output)(hidden), logits)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_starts_as_the_base_or_near(kind: str) -> None:
    """What reads drafted tokens must add nothing at first, or training starts from noise."""
    heads, output, _ = build_kind(kind, seed=None)
    hidden, tokens = torch.randn(5, 8), torch.randint(0, 20, (5, 3))
    base = output(hidden)
    with torch.no_grad():
        found = full_logits(heads, heads.logits(hidden, output, tokens))
    kept = heads.token_map if heads.token_map is not None else torch.arange(20)
    assert torch.isinf(found).sum() == 3 * 5 * (20 - len(kept))
    if heads.lm_head == "low_rank":
        left, values, right = torch.linalg.svd(output.weight)
        nearest = left[:, :4] * values[:4] @ right[:4]
        base = output.finish(hidden @ nearest.T + output.bias)
    for logits in found:
        torch.testing.assert_close(logits[:, kept], base[:, kept])


def test_shared_rows_are_gathered_once_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered at every step they cost a copy of megabytes; of an earlier text, wrong guesses."""
    gathered = []
    real = MedusaHeads.shared_rows
    counting = lambda *args: gathered.append(1) or real(*args)  # noqa: E731
    monkeypatch.setattr(MedusaHeads, "shared_rows", counting)
    for kind in ("shared_pruned", "hydra_rows"):
        heads, output, _ = build_kind(kind)
        assert not any("lm_head" in name for name in heads.state_dict())
        assert heads.token_map is not None and "token_map" in heads.state_dict()
        with torch.no_grad():
            output.weight.mul_(3)
        hidden, root = torch.randn(2, 8), torch.tensor([3, 4])
        gathered.clear()
        if heads.sequential:
            begin = heads.steps(output, 3)()
            walks = [begin(hidden, root) for _ in range(4)]
            found = [walk.logits() for walk in walks][0][:, 0]
        else:
            guess = heads.snapshot(output)
            found = [guess(hidden) for _ in range(4)][0][0]
        assert len(gathered) == 1
        expected = heads.logits(hidden, output, root[:, None].expand(-1, 3))[0]
        torch.testing.assert_close(found, expected)


def test_a_pruned_head_speaks_of_tokens_it_knows() -> None:
    """Places among the kept tokens taken for token ids draft nonsense that is never accepted."""
    heads, output, _ = build_kind("pruned")
    assert heads.token_map is not None and heads.token_map.tolist() == sorted(KEPT.tolist())
    places = heads.logits(torch.randn(4, 8), output).argmax(-1)
    assert set(heads.token_ids(places).flatten().tolist()) <= set(KEPT.tolist())
    labels = torch.tensor([3, 19, 4, IGNORE, 0])
    assert heads.map_labels(labels).tolist() == [2, 6, IGNORE, IGNORE, 0]
    with pytest.raises(ValueError, match="distinct tokens to keep must be 7, all below 20, got 2"):
        heads.init_from_output(output.weight, torch.tensor([1, 1, 2]))


def test_the_prefix_layer_sees_its_own_document_only() -> None:
    """Packed rows would leak the neighbour's text into the heads, in training only."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    heads = MedusaHeads(2, 1, 8, 20, prefix=sizes)
    hidden = torch.randn(1, 9, 8)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    torch.testing.assert_close(heads.contextual(hidden, positions), hidden)  # it starts as nothing
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.5)
        packed = heads.contextual(hidden, positions)
        for part in (slice(0, 4), slice(4, 9)):
            alone = heads.contextual(hidden[:, part], positions[:, part])
            torch.testing.assert_close(packed[:, part], alone)
        changed = hidden.clone()
        changed[0, 8] += 1  # the last token may tell the others nothing
        later = heads.contextual(changed, positions)
    torch.testing.assert_close(later[:, :8], packed[:, :8])
    assert not torch.allclose(later[:, 8], packed[:, 8])


def test_the_prefix_layer_keeps_its_positions_exact() -> None:
    """Rotary angles rounded to bfloat16 turn positions behind the first hundred into others."""
    sizes = {"hidden_size": 64, "intermediate_size": 16, "num_attention_heads": 2}
    heads = MedusaHeads(2, 1, 64, 20, prefix=sizes)
    assert heads.prefix is not None
    table = heads.prefix.model.rotary_emb.inv_freq.clone()
    heads.to(dtype=torch.bfloat16)
    assert heads.prefix.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(heads.prefix.model.rotary_emb.inv_freq, table)
    assert all(p.dtype == torch.bfloat16 for p in heads.parameters())


def test_sequential_heads_do_not_guess_without_tokens() -> None:
    """Zeros for the tokens drafted before would look like a weak head."""
    heads, output, embed = build_kind("hydra")
    hidden = torch.randn(2, 8)
    with pytest.raises(ValueError, match="tokens is None"):
        heads.logits(hidden, output)
    heads.embed = None
    with pytest.raises(ValueError, match="embed is None"):
        heads.logits(hidden, output, torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="sequential heads cannot guess all at once"):
        heads.snapshot(output)
    assert embed.weight.grad is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lm_head": "low_rank"}, r"rank must be in 1\.\.8"),
        ({"lm_head": "pruned", "num_kept": 21}, r"num_kept must be in 1\.\.20"),
        ({"markov_rank": -1}, "markov_rank must be at least 0, got -1"),
    ],
)
def test_sizes_out_of_range(options: dict[str, Any], message: str) -> None:
    """A rank of 0 would build heads that always guess token 0."""
    with pytest.raises(ValueError, match=message):
        MedusaHeads(3, 1, 8, 20, **options)
