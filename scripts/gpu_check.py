"""Check on the device at hand what the tests check on a CPU, and what only a GPU can do.

    python scripts/gpu_check.py --out benchmarks/h200/gpu_check.json
    python scripts/gpu_check.py --device cpu --only identity/llama memory

Prints one line per check: ok, failed, or not run with the reason; exits with 1 if one failed. Uses
the library directly: needs torch, transformers and this repository, nothing else. Models are tiny
and random, or the golden checkpoint of the tests.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from specheads.attention.cache import TreeCache
from specheads.attention.tree import Tree, default_tree
from specheads.decoding.generate import SpecDecoder
from specheads.decoding.loop import decode, plain_decode
from specheads.decoding.result import DecodeResult
from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.growing import Grown
from specheads.drafters.heads import HeadsDrafter, dynamic_drafter, static_drafter
from specheads.drafters.lookup import NgramDrafter
from specheads.measure.identity import Divergence, Rounding, compare
from specheads.models.blocks import prefix_sizes
from specheads.models.checkpoint import load_export
from specheads.models.heads import MedusaHeads
from specheads.models.output import output_layer
from specheads.models.support import tree_support
from specheads.system.hardware import environment
from specheads.verification.sampling import Sampler
from tests.zoo import TREE_MODELS, build

ROOT = Path(__file__).resolve().parent.parent
TREE = Tree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)])
PROMPTS = [
    [3, 9, 27, 17, 51, 25, 11, 33, 35],
    [5, 8],
    [7, 14, 28, 56, 48, 32, 7, 14, 28, 56, 48, 32],
]
NEW_TOKENS = 40
MODES = {"greedy": Sampler(), "sampled": Sampler(temperature=0.8, seed=3)}
GOLDEN = ROOT / "tests" / "golden"


class NotRun(Exception):  # noqa: N818 - no error
    """A check that this machine cannot do; the message says why."""


class Oracle:
    """A drafter that knows what will come and gets about every other guess wrong.

    Args:
        truth: per row prompt and continuation.
        tree: at a position either its nodes of rank 0 are right, or those of rank 1, or none.
    """

    taps: tuple[str, ...] = ()
    deterministic = True

    def __init__(self, truth: list[list[int]], tree: Tree = TREE) -> None:
        self.truth, self.tree = truth, tree

    def start(self, prefill: Prefill) -> tuple[list[int], list[int], Tensor]:
        """Remember the rows, where their roots stand, and the roots."""
        lengths = [len(ids) for ids in prefill.ids]
        return list(range(len(lengths))), lengths, prefill.root

    def propose(self, state: tuple[list[int], list[int], Tensor]) -> Candidates:
        """Guess."""
        rows, positions, root = state
        tokens = [
            [0, *map(partial(self._guess, row, position), self.tree.choices)]
            for row, position in zip(rows, positions, strict=True)
        ]
        guesses = torch.tensor(tokens, device=root.device)
        guesses[:, 0] = root
        return Candidates(guesses, self.tree.to(root.device))

    def _guess(self, row: int, position: int, choice: tuple[int, ...]) -> int:
        i = position + len(choice)
        right = self.truth[row][i] if i < len(self.truth[row]) else 0
        missed = 9 if i % 5 == 0 else i % 3 == 0  # by all ranks; by rank 0, for rank 1 to hit
        # equal siblings would have to be merged: every rank guesses another token
        return (right + choice[-1] - missed) % 64

    def observe(self, state: Any, result: StepResult) -> tuple[list[int], list[int], Tensor]:
        """Move on."""
        gained = map(len, result.new_tokens)
        positions = [n + new for n, new in zip(state[1], gained, strict=True)]
        return state[0], positions, result.next_root

    def select(self, state: Any, rows: Tensor) -> tuple[list[int], list[int], Tensor]:
        """Keep some rows."""
        kept = rows.tolist()
        return [state[0][i] for i in kept], [state[1][i] for i in kept], state[2][rows]


def padded(prompts: list[list[int]], device: torch.device) -> dict[str, Tensor]:
    """Return prompts as left-padded ``input_ids`` and ``attention_mask``."""
    width = max(map(len, prompts))
    ids = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


def run_both(
    model: PreTrainedModel,
    prompts: list[list[int]],
    sampler: Sampler,
    tree: Tree = TREE,
    **options: Any,
) -> tuple[DecodeResult, DecodeResult]:
    """Decode plainly, row by row the truth of an Oracle; then by tree."""
    inputs = padded(prompts, model.device)
    plain = plain_decode(model, **inputs, max_new_tokens=NEW_TOKENS, sampler=sampler)
    truth = [
        prompt + row.new_tokens + [0] * 8 for prompt, row in zip(prompts, plain.rows, strict=True)
    ]
    drafter = Oracle(truth, tree)
    found = decode(model, drafter, **inputs, max_new_tokens=NEW_TOKENS, sampler=sampler, **options)
    return plain, found


def require_identity(model: PreTrainedModel, tree: Tree = TREE, **options: Any) -> str:
    """Compare tree and plain decoding: greedy and sampled, one row and three of other lengths."""
    replays, lengths = 0, []
    for mode, sampler in MODES.items():
        for prompts in ([PROMPTS[0]], PROMPTS):
            if len(prompts) > 1 and tree_support(model).kind == "chain":
                continue
            plain, found = run_both(model, prompts, sampler, tree, **options)
            for row, (left, right) in enumerate(zip(plain.rows, found.rows, strict=True)):
                if left.new_tokens != right.new_tokens:
                    raise AssertionError(f"{mode}, row {row} of {len(prompts)}: other tokens")
            replays += plain.num_replays + found.num_replays
            lengths.append(found.accept_length)
    if min(lengths) < 1.3:
        raise AssertionError(f"the right guesses were not accepted: accept length {min(lengths)}")
    return f"accept length {min(lengths):.2f} or more, {replays} near ties replayed"


def identity(name: str, device: torch.device) -> str:
    """Float32: the tree's tokens are the plain ones, on one architecture."""
    return require_identity(build(name).to(device))


def batch_rows(device: torch.device) -> str:
    """Float32: every row of a batch is the row decoded alone."""
    model = build("llama").to(device)
    for sampler in MODES.values():
        batch, _ = run_both(model, PROMPTS, sampler)
        for row, prompt in enumerate(PROMPTS):
            own = Sampler(temperature=sampler.temperature, seed=sampler.seed + row)
            alone, _ = run_both(model, [prompt], own)
            if batch.rows[row].new_tokens != alone.new_tokens:
                raise AssertionError(f"row {row} differs from the row alone")
    return f"{len(PROMPTS)} rows of {', '.join(str(len(p)) for p in PROMPTS)} tokens"


def attention(name: str, device: torch.device) -> str:
    """Float32 identity under one attention implementation."""
    model = build("llama", head_dim=16).to(device)  # flex_attention takes no head narrower
    model.set_attn_implementation(name)
    if name == "flex_attention" and device.type == "cpu":
        # compiling took 5 minutes here and then failed in the C++ compiler (torch 2.13)
        with torch.compiler.set_stance("force_eager"):
            return f"{require_identity(model)}; not compiled"
    return require_identity(model)


def flash_attention(device: torch.device) -> str:
    """Flash attention takes no tree: chains instead, or a refusal where it is missing."""
    if not is_flash_attn_2_available():
        try:
            build("llama").set_attn_implementation("flash_attention_2")
        except (ImportError, ValueError) as error:
            raise NotRun(f"flash-attn is missing; refused: {str(error).splitlines()[0]}") from None
        raise AssertionError("a missing flash-attn was not refused")
    model = build("llama", head_dim=16).to(device, torch.bfloat16)
    model.set_attn_implementation("flash_attention_2")
    support = tree_support(model)
    if support.kind != "chain":
        raise AssertionError(f"flash attention was taken for {support.kind}")
    return near_ties(model, Tree.chain(3), prompts=PROMPTS[:1])


def near_ties(model: PreTrainedModel, tree: Tree = TREE, prompts: list[list[int]] = PROMPTS) -> str:
    """Where tree and plain decoding differ, the two tokens were closer than rounding."""
    inputs = [torch.tensor([prompt], device=model.device) for prompt in prompts]
    found: list[Divergence] = []
    compared = 0
    lengths = []
    for sampler in MODES.values():
        pairs = [run_both(model, [prompt], sampler, tree) for prompt in prompts]
        lengths += [decoded.accept_length for _, decoded in pairs]
        texts = [plain.new_tokens for plain, _ in pairs]
        counted = compare(
            [f"prompt {i}" for i in range(len(prompts))],
            inputs,
            texts,
            [decoded.new_tokens for _, decoded in pairs],
            [sampler] * len(pairs),
            rounding=Rounding(model, list(zip(inputs, texts, strict=True)), [tree.num_nodes]),
        )
        compared += counted.compared
        found += counted.divergences
        if counted.failures:
            raise AssertionError(f"rounding does not explain {counted.failures[0]}")
    if min(lengths) < 1.1:
        raise AssertionError(f"the right guesses were not accepted: accept length {min(lengths)}")
    widest = max((each.margin_fp32 or 0.0 for each in found), default=0.0)
    return (
        f"{compared - len(found)} of {compared} identical, {len(found)} near ties, margins up to"
        f" {widest:.2g} in float32; accept length {min(lengths):.2f} or more"
    )


def low_precision(dtype: torch.dtype, device: torch.device) -> str:
    """Count near ties in bfloat16 or float16, on two architectures."""
    said = [near_ties(build(name).to(device, dtype)) for name in ("llama", "mistral-window")]
    return "; ".join(said)


def four_bit(device: torch.device) -> str:
    """A base in 4 bit verifies trees."""
    if find_spec("bitsandbytes") is None:
        raise NotRun("bitsandbytes is missing")
    from transformers import BitsAndBytesConfig

    with tempfile.TemporaryDirectory() as folder:
        # the kernels want round sizes
        sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
        build("llama", std=0.15, **sizes).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            device_map={"": device},
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=torch.float32,
            ),
        ).eval()
    assert isinstance(model, PreTrainedModel)
    return near_ties(model)


def compiled(device: torch.device) -> str:
    """The compiled verify step, on a GPU captured in CUDA graphs, gives the same tokens."""
    if "compile" not in inspect.signature(decode).parameters:
        raise NotRun("this version of the loop has no compile mode")
    if device.type == "cpu":
        raise NotRun("needs a GPU; tests/unit tries it on a CPU")
    from torch._dynamo.utils import counters

    model = build("llama").to(device)
    said = require_identity(model, compile=True)
    inputs = padded(PROMPTS, device)
    plain, as_fast = (
        plain_decode(model, **inputs, max_new_tokens=NEW_TOKENS, compile=compile)
        for compile in (False, True)
    )
    if not torch.equal(plain.sequences, as_fast.sequences):
        raise AssertionError("plain decoding gives other tokens when compiled")
    if skipped := counters["inductor"]["cudagraph_skips"]:
        raise AssertionError(f"same tokens, but {skipped} passes went without CUDA graphs; {said}")
    return said


def kv_commit(device: torch.device) -> str:
    """After every step the cache holds what a fresh prefill of the text would."""
    worst = 0.0
    for name in ("llama", "mistral-window", "gpt2"):
        model = build(name).to(device)
        cache = TreeCache()
        run_both(model, [PROMPTS[0]], MODES["greedy"], cache=cache)
        tokens = torch.tensor(cache.tokens, device=device)
        fresh = DynamicCache()  # without the config: full length in sliding layers too
        with torch.no_grad():
            model(input_ids=tokens, past_key_values=fresh, use_cache=True)
        for ours, theirs in zip(cache.layers, fresh.layers, strict=True):
            for kept, whole in zip(ours.buffers, (theirs.keys, theirs.values), strict=True):
                kept = kept[:, :, : tokens.shape[1]]
                worst = max(worst, float((kept - whole).abs().max() / whole.abs().max()))
    if worst > 1e-4:
        raise AssertionError(f"keys or values differ by {worst:.2g} of the largest")
    return f"largest relative difference {worst:.1g}"


def golden(device: torch.device) -> str:
    """The golden checkpoint's tokens and accept lengths, which were pinned on a CPU."""
    export = load_export(GOLDEN / "export", dtype="float32", device=device)
    said = []
    for case in json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))["cases"]:
        drafter = (
            NgramDrafter()
            if case["drafter"] == "lookup"
            else HeadsDrafter(export.heads, output_layer(export.base), export.tree)
        )
        result = decode(
            export.base,
            drafter,
            **padded(case["prompts"], device),
            max_new_tokens=case["max_new_tokens"],
            sampler=Sampler(temperature=case["temperature"], seed=case["seed"]),
            eos_token_ids=[export.tokenizer.eos_token_id],
        )
        for key in ("new_tokens", "accept_lengths"):
            if [getattr(row, key) for row in result.rows] != case[key]:
                raise AssertionError(f"{case['name']}: other {key}")
        said.append(f"{case['name']} {result.accept_length:.2f}")
    return ", ".join(said)


def dynamic_trees(device: torch.device) -> str:
    """Trees that the heads grow anew for every row and step give the pinned tokens too."""
    export = load_export(GOLDEN / "export", dtype="float32", device=device)
    drafter = HeadsDrafter(export.heads, output_layer(export.base), Grown(16))
    said = []
    for case in json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))["cases"]:
        result = decode(
            export.base,
            drafter,
            **padded(case["prompts"], device),
            max_new_tokens=case["max_new_tokens"],
            sampler=Sampler(temperature=case["temperature"], seed=case["seed"]),
            eos_token_ids=[export.tokenizer.eos_token_id],
        )
        if [row.new_tokens for row in result.rows] != case["new_tokens"]:
            raise AssertionError(f"{case['name']}: other tokens")
        said.append(f"{case['name']} {result.accept_length:.2f}")
    return ", ".join(said)


def head_kinds(device: torch.device) -> str:
    """Sequential, pruned and low-rank heads and a prefix layer, untrained, give the pinned tokens.

    They must take as many steps as on a CPU, too, but for guesses that rounding swaps: nothing else
    would notice wrong ones.
    """
    export = load_export(GOLDEN / "export", dtype="float32", device=device)
    base, output = export.base, output_layer(export.base)
    elsewhere = load_export(GOLDEN / "export", dtype="float32", device="cpu").base
    kinds: dict[str, dict[str, Any]] = {
        "pruned": {"lm_head": "pruned", "num_kept": 200},
        "low rank, markov": {"lm_head": "low_rank", "rank": 32, "markov_rank": 8},
        "hydra, prefix": {"condition": True, "prefix": prefix_sizes(base.config)},
    }
    cases = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))["cases"]
    said = []
    for name, options in kinds.items():
        torch.manual_seed(0)
        heads = MedusaHeads(3, 1, export.heads.hidden_size, export.heads.vocab_size, **options)
        heads.init_from_output(output.weight.cpu())
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        num_steps: Counter[str] = Counter()
        for model, place in ((elsewhere, torch.device("cpu")), (base, device)):
            heads = heads.to(place).eval()
            layer = output_layer(model)
            for drafter in (
                static_drafter(model, heads, layer, default_tree(3, 12)),
                dynamic_drafter(model, heads, layer, 12),
            ):
                for case in cases:
                    result = decode(
                        model,
                        drafter,
                        **padded(case["prompts"], place),
                        max_new_tokens=case["max_new_tokens"],
                        sampler=Sampler(temperature=case["temperature"], seed=case["seed"]),
                        eos_token_ids=[export.tokenizer.eos_token_id],
                    )
                    if [row.new_tokens for row in result.rows] != case["new_tokens"]:
                        raise AssertionError(f"{name}, {case['name']}: other tokens")
                    num_steps[str(place)] += sum(len(row.accept_lengths) for row in result.rows)
        here, on_cpu = num_steps[str(device)], num_steps["cpu"]
        if abs(here - on_cpu) > 0.01 * on_cpu:
            raise AssertionError(f"{name}: {here} steps, on a CPU {on_cpu}")
        said.append(f"{name} {here} steps")
    return ", ".join(said)


def doors(device: torch.device) -> str:
    """Our ``generate`` and that of transformers give the same tokens; a cache outlives a turn."""
    export = load_export(GOLDEN / "export", dtype="float32", device=device)
    drafter = HeadsDrafter(export.heads, output_layer(export.base), export.tree)
    decoder = SpecDecoder(export.base, drafter, seed=5)
    inputs = padded(PROMPTS, device)
    settings: dict[str, Any] = {"max_new_tokens": 24, "repetition_penalty": 1.1}
    for temperature in (0.0, 0.7):
        ours = decoder.generate(**inputs, temperature=temperature, **settings)
        sampling = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature}
        theirs = export.base.generate(**inputs, custom_generate=decoder, **sampling, **settings)
        if not torch.equal(ours.sequences, theirs):
            raise AssertionError(f"temperature {temperature}: the doors give other tokens")
    first = decoder.generate(inputs["input_ids"][-1:], 12, return_dict_in_generate=True)
    turn = torch.cat([first.sequences, inputs["input_ids"][-1:]], dim=1)
    again = decoder.generate(turn, 12, past_key_values=first.cache)
    if not torch.equal(again.sequences, decoder.generate(turn, 12).sequences):
        raise AssertionError("a second turn behind the cache differs from a fresh one")
    return f"{len(PROMPTS)} rows; a second turn of {turn.shape[1]} tokens"


def synchronisations(device: torch.device) -> str:
    """A step waits for the device once."""
    if device.type != "cuda":
        raise NotRun("needs a CUDA device")
    export = load_export(GOLDEN / "export", dtype="bfloat16", device=device)
    drafter = HeadsDrafter(export.heads, output_layer(export.base), export.tree)
    inputs = padded([PROMPTS[0]], device)
    places: Counter[str] = Counter()
    counts, steps = [], []
    for max_new_tokens in (50, 250):  # the difference leaves out the prefill
        decode(export.base, drafter, **inputs, max_new_tokens=max_new_tokens)  # warm
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = decode(export.base, drafter, **inputs, max_new_tokens=max_new_tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits = [w for w in caught if "synchroniz" in str(w.message)]
        counts.append(len(waits))
        steps.append(result.num_steps)
        places.update(f"{Path(w.filename).name}:{w.lineno}" for w in waits)
    per_step = (counts[1] - counts[0]) / (steps[1] - steps[0])
    where = ", ".join(f"{place} {count}" for place, count in places.most_common(4))
    if per_step > 1.05:
        raise AssertionError(f"{per_step:.2f} per step: {where}")
    return f"{per_step:.2f} per step: {where}"


def memory(device: torch.device) -> str:
    """A second text takes no more memory than the first, and nothing stays behind."""
    model = build("llama").to(device)
    run_both(model, PROMPTS, MODES["sampled"])
    if device.type != "cuda":
        raise NotRun("needs a CUDA device; decoding itself ran")
    left, peaks = [], []
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        run_both(model, PROMPTS, MODES["sampled"])
        left.append(torch.cuda.memory_allocated())
        peaks.append(torch.cuda.max_memory_allocated())
    if left[2] > left[0] or peaks[2] > peaks[0]:
        raise AssertionError(f"left behind {left}, peaks {peaks} bytes")
    return f"peak {peaks[0] / 2**20:.1f} MiB, {left[0] / 2**20:.1f} MiB stay"


def several_devices(device: torch.device) -> str:
    """A base whose layers lie on two devices."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        raise NotRun("needs two CUDA devices")
    layers = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1}
    with tempfile.TemporaryDirectory() as folder:
        build("llama").save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, device_map={**layers, "model.norm": 1, "model.rotary_emb": 0, "lm_head": 1}
        ).eval()
    return require_identity(model)


Check = Callable[[torch.device], str]
CHECKS: dict[str, Check] = {
    **{f"identity/{name}": partial(identity, name) for name in TREE_MODELS},
    "batch rows": batch_rows,
    "golden": golden,
    "dynamic trees": dynamic_trees,
    "head kinds": head_kinds,
    "doors": doors,
    "kv commit": kv_commit,
    **{f"attention/{name}": partial(attention, name) for name in ("sdpa", "eager")},
    "attention/flash_attention_2": flash_attention,
    "bfloat16": partial(low_precision, torch.bfloat16),
    "float16": partial(low_precision, torch.float16),
    "4 bit": four_bit,
    "compile": compiled,
    "synchronisations": synchronisations,
    "memory": memory,
    "several devices": several_devices,
    "attention/flex_attention": partial(attention, "flex_attention"),  # compiles: the slowest
}


def run_check(name: str, device: torch.device) -> dict[str, Any]:
    """Run one check; return its name, status, detail and seconds."""
    # TensorFloat-32 keeps 10 bits: nothing would be identical
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    start = time.perf_counter()
    row: dict[str, Any] = {"check": name}
    try:
        row |= {"status": "ok", "detail": CHECKS[name](device)}
    except NotRun as reason:
        row |= {"status": "not run", "detail": str(reason)}
    except Exception as error:  # whatever goes wrong, the other checks are worth their time
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        detail = first if isinstance(error, AssertionError) else f"{type(error).__name__}: {first}"
        row |= {"status": "failed", "detail": detail, "traceback": traceback.format_exc()}
    return {**row, "seconds": round(time.perf_counter() - start, 2)}


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, check, print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="CHECK")
    parser.add_argument("--out", type=Path, help="write JSON there")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {device}: torch {torch.__version__} sees no CUDA device")
    rows = []
    for name in args.only:
        row = run_check(name, device)
        print(f"{row['status']:8} {name} ({row['seconds']} s): {row['detail']}", flush=True)
        rows.append(row)
        if args.out:  # after every check: the machine may be taken away
            args.out.parent.mkdir(parents=True, exist_ok=True)
            report = {"environment": environment(), "device": str(device), "checks": rows}
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    failed = sum(row["status"] == "failed" for row in rows)
    ran = sum(row["status"] == "ok" for row in rows)
    print(f"{ran} ok, {failed} failed, {len(rows) - ran - failed} not run")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
