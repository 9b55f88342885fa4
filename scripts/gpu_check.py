"""Check on the device at hand what the tests check on a CPU, and what only a GPU can do.

    python scripts/gpu_check.py --out benchmarks/h200/gpu_check.json
    python scripts/gpu_check.py --device cpu --only identity/llama memory

Prints one line per check: ok, failed, or not run with the reason; exits with 1 if one failed. Uses
the library directly: needs torch, transformers and this repository, nothing else. Models are tiny
and random, or the golden checkpoint of the tests.
"""

import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import harness
import make_golden
import torch
from harness import CPU, NotRun
from make_golden import GOLDEN, decode_case
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from specheads.attention.cache import TreeCache
from specheads.attention.tree import Tree, default_tree
from specheads.config import HeadsConfig, LossConfig, OptimConfig, TrainConfig
from specheads.decoding.generate import SpecDecoder
from specheads.decoding.loop import decode, plain_decode
from specheads.decoding.result import DecodeResult
from specheads.drafters.growing import Grown
from specheads.drafters.heads import heads_drafter
from specheads.measure.clock import Prompt
from specheads.measure.identity import Divergence, Rounding, compare
from specheads.models.checkpoint import KINDS, Export, load_export
from specheads.models.kinds import Heads
from specheads.models.output import output_layer
from specheads.models.support import tree_support
from specheads.system import hardware
from specheads.training.engine import param_groups
from specheads.training.loop import open_engine
from specheads.training.objectives import HeadsObjective
from specheads.verification.sampling import Sampler
from tests.ragged import padded
from tests.scripted import ScriptedDrafter
from tests.zoo import TREE_MODELS, build

TREE = Tree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)])
PROMPTS = [
    torch.tensor([[3, 9, 27, 17, 51, 25, 11, 33, 35]]),
    torch.tensor([[5, 8]]),
    torch.tensor([[7, 14, 28, 56, 48, 32, 7, 14, 28, 56, 48, 32]]),
]
NEW_TOKENS = 40
FORMS = {
    "pruned": HeadsConfig(num_heads=3, lm_head="pruned", num_kept=200),
    "low rank, markov": HeadsConfig(
        num_heads=3, lm_head="low_rank", rank=32, correction="markov", markov_rank=8
    ),
    "hydra, prefix": HeadsConfig(num_heads=3, condition=True, prefix_layer=True),
    "block": HeadsConfig(kind="block", num_heads=3, lm_head="shared"),
    "dspark": HeadsConfig(
        kind="block",
        num_heads=3,
        lm_head="shared",
        correction="markov",
        markov_rank=8,
        options={"form": "published", "mask_token_id": 0, "anchors": 20},
    ),
    "eagle3": HeadsConfig(kind="eagle3", num_heads=3, lm_head="own"),
}
MODES = {"greedy": Sampler(), "sampled": Sampler(temperature=0.8, seed=3)}


@dataclass
class Settings:
    """What is checked.

    Attributes:
        only: these checks
        out: write JSON there
    """

    device: str = "auto"
    only: tuple[str, ...] = ()
    out: Path | None = None

    def __post_init__(self) -> None:
        self.device = str(hardware.pick_device(self.device))
        if unknown := set(self.only) - set(CHECKS):
            raise ValueError(f"no such check: {', '.join(unknown)}; there are {', '.join(CHECKS)}")


def inputs(prompts: Sequence[Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return prompts as left-padded ``input_ids`` and ``attention_mask``."""
    return {key: value.to(device) for key, value in padded(list(prompts)).items()}


def run_both(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    sampler: Sampler,
    tree: Tree = TREE,
    **options: Any,
) -> tuple[DecodeResult, DecodeResult]:
    """Decode plainly, row by row the truth of a ScriptedDrafter; then by tree."""
    given: dict[str, Any] = {**inputs(prompts, model.device), "max_new_tokens": NEW_TOKENS}
    plain = plain_decode(model, **given, sampler=sampler)
    rows = zip(prompts, plain.rows, strict=True)
    truth = [prompt[0].tolist() + row.new_tokens + [0] * 8 for prompt, row in rows]
    drafter = ScriptedDrafter(tree, truth, 0.7)
    return plain, decode(model, drafter, **given, sampler=sampler, **options)


def require_identity(model: PreTrainedModel, tree: Tree = TREE, **options: Any) -> str:
    """Compare tree and plain decoding: greedy and sampled, one row and three of other lengths."""
    replays, lengths = 0, []
    for mode, sampler in MODES.items():
        for prompts in (PROMPTS[:1], PROMPTS):
            if len(prompts) > 1 and tree_support(model).kind == "chain":
                continue
            plain, found = run_both(model, prompts, sampler, tree, **options)
            for row, (left, right) in enumerate(zip(plain.rows, found.rows, strict=True)):
                where = f"{mode}, row {row} of {len(prompts)}"
                assert left.new_tokens == right.new_tokens, f"{where}: other tokens"
                own = Sampler(temperature=sampler.temperature, seed=sampler.seed + row)
                alone, _ = run_both(model, prompts[row : row + 1], own, tree)
                assert alone.new_tokens == left.new_tokens, f"{where}: not those of the row alone"
            replays += plain.num_replays + found.num_replays
            lengths.append(found.accept_length)
    assert min(lengths) >= 1.3, f"the right guesses were not accepted: accept length {min(lengths)}"
    return f"accept length {min(lengths):.2f} or more, {replays} near ties replayed"


def identity(name: str, device: torch.device) -> str:
    """Float32: the tree's tokens are the plain ones, on one architecture."""
    return require_identity(build(name).to(device))


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
    assert support.kind == "chain", f"flash attention was taken for {support.kind}"
    return near_ties(model, Tree.chain(3), prompts=PROMPTS[:1])


def near_ties(
    model: PreTrainedModel, tree: Tree = TREE, prompts: Sequence[Tensor] = PROMPTS
) -> str:
    """Where tree and plain decoding differ, the two tokens were closer than rounding."""
    given = [prompt.to(model.device) for prompt in prompts]
    found: list[Divergence] = []
    compared, lengths = 0, []
    for sampler in MODES.values():
        pairs = [run_both(model, [prompt], sampler, tree) for prompt in prompts]
        lengths += [decoded.accept_length for _, decoded in pairs]
        texts = [plain.new_tokens for plain, _ in pairs]
        rounding = Rounding(model, list(zip(given, texts, strict=True)), [tree.num_nodes])
        named = [Prompt(f"prompt {i}", "", prompt) for i, prompt in enumerate(given)]
        guessed = [decoded.new_tokens for _, decoded in pairs]
        diverging = compare(named, texts, guessed, [sampler] * len(pairs), rounding=rounding)
        compared += len(pairs)
        found += diverging
        wrong = [each for each in diverging if not each.near_tie]
        assert not wrong, f"rounding does not explain {wrong[0]}"
    assert min(lengths) >= 1.1, f"the right guesses were not accepted: accept length {min(lengths)}"
    widest = max((each.margin_fp32 or 0.0 for each in found), default=0.0)
    return (
        f"{compared - len(found)} of {compared} identical, {len(found)} near ties, margins up to"
        f" {widest:.2g} in float32; accept length {min(lengths):.2f} or more"
    )


def low_precision(dtype: torch.dtype, device: torch.device) -> str:
    """Count near ties in bfloat16 or float16, on two architectures."""
    said = [near_ties(build(name).to(device, dtype)) for name in ("llama", "mistral-window")]
    return "; ".join(said)


def loaded_anew(sizes: dict[str, Any], **options: Any) -> PreTrainedModel:
    """Return a model of some sizes as ``from_pretrained`` loads it with ``options``."""
    with tempfile.TemporaryDirectory() as folder:
        build("llama", **sizes).save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def four_bit(device: torch.device) -> str:
    """A base in 4 bit verifies trees."""
    if find_spec("bitsandbytes") is None:
        raise NotRun("bitsandbytes is missing")
    from transformers import BitsAndBytesConfig

    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    how = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **nf4)}
    # the kernels want round sizes
    sizes = {"std": 0.15, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    return near_ties(loaded_anew(sizes, dtype=torch.float32, device_map={"": device}, **how))


def several_devices(device: torch.device) -> str:
    """A base whose layers lie on two devices."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        raise NotRun("needs two CUDA devices")
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.rotary_emb": 0}
    places |= {"model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    return require_identity(loaded_anew({}, device_map=places))


def compiled(device: torch.device) -> str:
    """The compiled verify step, on a GPU captured in CUDA graphs, gives the same tokens."""
    if device.type == "cpu":
        raise NotRun("needs a GPU; the tests try it on a CPU")
    from torch._dynamo.utils import counters

    model = build("llama").to(device)
    said = require_identity(model, compile=True)
    given: dict[str, Any] = {**inputs(PROMPTS, device), "max_new_tokens": NEW_TOKENS}
    plain, as_fast = (plain_decode(model, **given, compile=fast) for fast in (False, True))
    assert torch.equal(plain.sequences, as_fast.sequences), "plain tokens differ when compiled"
    if skipped := counters["inductor"]["cudagraph_skips"]:
        raise AssertionError(f"same tokens, but {skipped} passes went without CUDA graphs; {said}")
    return said


def kv_commit(device: torch.device) -> str:
    """After every step the cache holds what a fresh prefill of the text would."""
    worst = 0.0
    for name in ("llama", "mistral-window", "gpt2"):
        model = build(name).to(device)
        cache = TreeCache()
        run_both(model, PROMPTS[:1], MODES["greedy"], cache=cache)
        tokens = torch.tensor(cache.tokens, device=device)
        fresh = DynamicCache()  # without the config: full length in sliding layers too
        with torch.no_grad():
            model(input_ids=tokens, past_key_values=fresh, use_cache=True)
        for ours, theirs in zip(cache.layers, fresh.layers, strict=True):
            for kept, whole in zip(ours.buffers, (theirs.keys, theirs.values), strict=True):
                kept = kept[:, :, : tokens.shape[1]]
                worst = max(worst, float((kept - whole).abs().max() / whole.abs().max()))
    assert worst <= 1e-4, f"keys or values differ by {worst:.2g} of the largest"
    return f"largest relative difference {worst:.1g}"


def golden_export(device: torch.device, dtype: str = "float32") -> Export:
    """Return the golden checkpoint, whose tokens and accept lengths were pinned on a CPU."""
    return load_export(GOLDEN / "export", dtype=dtype, device=device)


def pinned(export: Export, drafter: Any, *keys: str) -> list[DecodeResult]:
    """Decode the golden cases; raise AssertionError where ``keys`` are not the pinned ones."""
    results = []
    for case in make_golden.cases():
        results.append(decode_case(export, case, drafter))
        for key in keys:
            found = [getattr(row, key) for row in results[-1].rows]
            assert found == case[key], f"{case['name']}: other {key}"
    return results


def golden(device: torch.device) -> str:
    """Tokens and accept lengths are the pinned ones."""
    found = pinned(golden_export(device), None, "new_tokens", "accept_lengths")
    return ", ".join(f"{each.accept_length:.2f}" for each in found)


def dynamic_trees(device: torch.device) -> str:
    """Trees that the heads grow anew for every row and step give the pinned tokens too."""
    export = golden_export(device)
    drafter = heads_drafter(export.base, export.heads, output_layer(export.base), Grown(16))
    return ", ".join(f"{each.accept_length:.2f}" for each in pinned(export, drafter, "new_tokens"))


def make_heads(name: str, base: PreTrainedModel) -> Heads:
    """Return heads of one of FORMS that have moved a little from their start."""
    torch.manual_seed(0)
    settings = FORMS[name]
    heads: Any = KINDS[settings.kind].from_settings(settings, base, output_layer(base))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return heads


def head_kinds(device: torch.device) -> str:
    """Heads of every kind, untrained, give the pinned tokens.

    They must take as many steps as on a CPU, too, but for guesses that rounding swaps: nothing else
    would notice wrong ones.
    """
    exports = {"cpu": golden_export(CPU), "here": golden_export(device)}
    said = []
    for name in FORMS:
        heads = make_heads(name, exports["cpu"].base)
        num_steps: Counter[str] = Counter()
        for place, export in exports.items():
            layer = output_layer(export.base)
            heads = heads.to(export.base.device).eval()
            for drafter in (
                heads_drafter(export.base, heads, layer, default_tree(3, 12)),
                heads_drafter(export.base, heads, layer, Grown(12)),
            ):
                for result in pinned(export, drafter, "new_tokens"):
                    num_steps[place] += sum(len(row.accept_lengths) for row in result.rows)
        here, there = num_steps["here"], num_steps["cpu"]
        assert abs(here - there) <= 0.01 * there, f"{name}: {here} steps, on a CPU {there}"
        said.append(f"{name} {here} steps")
    return ", ".join(said)


def training(device: torch.device) -> str:
    """Some steps of AdamW and Muon on heads of every kind lower the loss as they do on a CPU."""
    ids = torch.randint(200, (3, 96), generator=torch.Generator().manual_seed(0))
    worst = 0.0
    for name, optimizer in ((name, kind) for name in FORMS for kind in ("adamw", "muon")):
        losses: dict[str, list[float]] = {}
        for place in (CPU, device):
            base = golden_export(place).base
            heads = make_heads(name, golden_export(CPU).base).to(place)
            loss = LossConfig(heads="soft" if heads.taps else "hard")
            objective = HeadsObjective(base, heads, loss, train_base=False)
            optim = OptimConfig(name=optimizer, lr=3e-3)
            cfg = TrainConfig(run_dir=tempfile.gettempdir(), optim=optim)
            runner = open_engine(objective, param_groups(optim, heads=(heads, optim.lr)), cfg)
            batch = harness.batch_of(ids.to(place))
            found = []
            for _ in range(6):
                value, _ = runner.forward(batch)
                runner.backward(value, last=True)
                runner.step(1.0)
                found.append(float(value.detach()))
            runner.close()
            losses[str(place)] = found
        there, here = losses[str(CPU)], losses[str(device)]
        off = max(abs(a / b - 1) for a, b in zip(here, there, strict=True))
        assert here[-1] < 0.99 * here[0], f"{name}, {optimizer}: losses {here}"
        assert off <= 1e-3, f"{name}, {optimizer}: losses {here}, on a CPU {there}"
        worst = max(worst, off)
    return f"{len(FORMS)} kinds; losses differ by {worst:.1g} of them at most"


def doors(device: torch.device) -> str:
    """Our ``generate`` and that of transformers give the same tokens; a cache outlives a turn."""
    export = golden_export(device)
    decoder = SpecDecoder(export.base, harness.tree_drafter(export), seed=5)
    given = inputs(PROMPTS, device)
    settings: dict[str, Any] = {"max_new_tokens": 24, "repetition_penalty": 1.1}
    for temperature in (0.0, 0.7):
        ours = decoder.generate(**given, temperature=temperature, **settings)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
        theirs = export.base.generate(**given, custom_generate=decoder, **sampling, **settings)
        assert torch.equal(ours.sequences, theirs), f"T={temperature}: other tokens by two doors"
    last = given["input_ids"][-1:]
    first = decoder.generate(last, 12, return_dict_in_generate=True)
    turn = torch.cat([first.sequences, last], dim=1)
    again = decoder.generate(turn, 12, past_key_values=first.cache)
    fresh = decoder.generate(turn, 12)
    assert torch.equal(again.sequences, fresh.sequences), "behind the cache a turn differs"
    return f"{len(PROMPTS)} rows; a second turn of {turn.shape[1]} tokens"


def synchronisations(device: torch.device) -> str:
    """A step waits for the device once."""
    if device.type != "cuda":
        raise NotRun("needs a CUDA device")
    export = golden_export(device, "bfloat16")
    run = partial(decode, export.base, harness.tree_drafter(export), **inputs(PROMPTS[:1], device))
    places: Counter[str] = Counter()
    counts, steps = [], []
    for max_new_tokens in (50, 250):  # the difference leaves out the prefill
        run(max_new_tokens=max_new_tokens)  # warm
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = run(max_new_tokens=max_new_tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits = [w for w in caught if "synchroniz" in str(w.message)]
        counts.append(len(waits))
        steps.append(result.num_steps)
        places.update(f"{Path(w.filename).name}:{w.lineno}" for w in waits)
    per_step = (counts[1] - counts[0]) / (steps[1] - steps[0])
    where = ", ".join(f"{place} {count}" for place, count in places.most_common(4))
    assert per_step <= 1.05, f"{per_step:.2f} per step: {where}"
    return f"{per_step:.2f} per step: {where}"


def memory(device: torch.device) -> str:
    """A second text takes no more memory than the first, and nothing stays behind."""
    model = build("llama").to(device)
    run_both(model, PROMPTS, MODES["sampled"])
    if device.type != "cuda":
        raise NotRun("needs a CUDA device; decoding itself ran")
    found = []
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        run_both(model, PROMPTS, MODES["sampled"])
        found.append((torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
    (left, peak), _, last = found
    assert last[0] <= left and last[1] <= peak, f"bytes left behind, and peaks: {found}"
    return f"peak {peak / 2**20:.1f} MiB, {left / 2**20:.1f} MiB stay"


Check = Callable[[torch.device], str]
CHECKS: dict[str, Check] = {
    **{f"identity/{name}": partial(identity, name) for name in TREE_MODELS},
    "golden": golden,
    "dynamic trees": dynamic_trees,
    "head kinds": head_kinds,
    "training": training,
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
    status, detail = harness.attempt(partial(CHECKS[name], device))
    seconds = round(time.perf_counter() - start, 2)
    return {"check": name, "status": status, "detail": detail, "seconds": seconds}


def main(argv: Sequence[str] | None = None) -> int:
    """Check, print, write; return the exit code."""
    given = harness.parse(Settings, argv)
    rows = []
    for name in given.only or CHECKS:
        row = run_check(name, torch.device(given.device))
        print(f"{row['status']:8} {name} ({row['seconds']} s): {row['detail']}", flush=True)
        rows.append(row)  # written after every check: the machine may be taken away
        found = {"environment": hardware.environment(), "device": given.device, "checks": rows}
        harness.write(given.out, found, quiet=True)
    counts = Counter(row["status"] for row in rows)
    print(f"{counts['ok']} ok, {counts['failed']} failed, {counts['not run']} not run")
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
