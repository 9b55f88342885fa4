r"""Try every causal model type of the installed transformers, tiny and random.

    python scripts/sweep_architectures.py --json benchmarks/architectures.json \
        --page docs/architectures.md
    python scripts/sweep_architectures.py --types llama gemma2

For each type: can it be built at this size; what the self-test makes of it; and, where it promises
anything, whether the promise is kept:

- our plain greedy text is that of transformers' generate();
- trees (or chains), sampled with a seed, give the plain text;
- three ragged rows decoded by tree give what each gives alone, or are refused as a batch.

Prompts are short, just before and just across each position that the config names. A promise that
is not kept is printed as WRONG, and the exit code is 1. Types that cannot be built from these
settings are listed and prove nothing.
"""

import contextlib
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import harness
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from specheads.attention.tree import default_tree
from specheads.config import ConfigError
from specheads.decoding.loop import decode, plain_decode
from specheads.models.base import context_length
from specheads.models.forward import named_positions
from specheads.models.support import tree_support
from specheads.verification.sampling import Sampler
from tests.ragged import padded
from tests.scripted import ScriptedDrafter
from tests.zoo import MODELS, SMALL, THRESHOLD, THRESHOLD_MODELS, VOCAB, WINDOW, redraw

MAX_PARAMETERS = 8_000_000
SECONDS = 60  # for one type
NUM_NEW = 12
SHORT = 9

# the names under which configs keep their sizes, for whatever has them
VALUES = """
    0 num_kv_shared_layers
    1 max_window_layers n_shared_experts n_group topk_group first_k_dense_replace
    2 num_experts_per_tok index_n_heads n_layer num_layers n_layers decoder_layers
    2 linear_num_value_heads linear_num_key_heads
    4 num_experts num_local_experts n_routed_experts n_head num_heads n_heads laurel_rank
    4 decoder_attention_heads
    8 qk_rope_head_dim qk_nope_head_dim hidden_size_per_layer_input query_pre_attn_scalar
    8 mamba_d_state linear_key_head_dim linear_value_head_dim
    12 v_head_dim
    16 kv_lora_rank q_lora_rank index_head_dim
    32 moe_intermediate_size shared_expert_intermediate_size n_embd d_model word_embed_proj_dim
    64 intermediate_size_mlp index_topk d_ff ffn_dim decoder_ffn_dim vocab_size_per_layer_input
    256 n_positions
"""
LINES = map(str.split, VALUES.strip().splitlines())
SIZES: dict[str, Any] = {name: int(value) for value, *names in LINES for name in names}
SIZES |= {"sliding_window": WINDOW, "attention_chunk_size": WINDOW}
SIZES |= {"keep_window_size": THRESHOLD, "floor_scale": THRESHOLD}
SIZES |= {**SMALL, "use_sliding_window": True, "attn_temperature_tuning": True}

# what the names above do not say
NO_IDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
NEED_IDS = ("cwm", "emu3", "gemma4", "gemma4_unified", "mllama", "modernbert-decoder")
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(NEED_IDS, NO_IDS),
    "gpt_neo": MODELS["gpt_neo"].changes,
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16]},
    "zaya": {"num_experts_per_tok": 1},
}
# encoders that are causal only if they are told
ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
    *("megatron-bert", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert"),
    *("roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
# the same type with another mechanism, whose threshold is within reach
VARIANTS = {name: kind for name, kind in THRESHOLD_MODELS.items() if "longrope" in name}
PHI4 = "phi4_multimodal"
VARIANTS[f"{PHI4}-longrope"] = VARIANTS["phi3-longrope"]._replace(model_type=PHI4)


@dataclass
class Settings:
    """What is tried.

    Attributes:
        json: where what was found is written
        page: where its table is written
    """

    types: tuple[str, ...] = (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS)
    json: Path | None = None
    page: Path | None = None


class TooBigError(ValueError):
    """The settings above do not make this type small."""


def settings_of(known: Any) -> dict[str, Any]:
    """Return what makes a config small, of those settings that it has."""
    settings: dict[str, Any] = {}
    for name, value in SIZES.items():
        own = getattr(type(known), name, None)
        with contextlib.suppress(Exception):  # one that differs from layer to layer
            if hasattr(known, name) and not (isinstance(own, property) and own.fset is None):
                settings[name] = value
    kinds = getattr(known, "layer_types", None)
    names = ("layer_types", "layers_block_type")
    if kinds and not any(isinstance(getattr(type(known), n, None), property) for n in names):
        settings["layer_types"] = (list(dict.fromkeys(kinds))[:2] * 2)[:2]  # one layer of each
    if hasattr(known, "kv_lora_rank"):
        settings["num_key_value_heads"] = 4
    for name in known.sub_configs or ():  # of models that also see and hear
        part = getattr(known, name, None)
        if isinstance(part, PreTrainedConfig):
            settings[name] = {"model_type": part.model_type} | settings_of(part)
    rope = getattr(known, "rope_parameters", None) or {}
    if "original_max_position_embeddings" in rope:
        settings["rope_parameters"] = rope | {"original_max_position_embeddings": THRESHOLD}
    if hasattr(known, "rotary_dim"):
        settings["rotary_dim"] = 4
    return settings


def build(name: str) -> PreTrainedModel:
    """Build a type as small as its config lets us."""
    model_type, changes, attention = VARIANTS.get(name, (name, CHANGES.get(name, {}), None))
    known = CONFIG_MAPPING[model_type]()
    settings = settings_of(known) | changes
    for part in filter(lambda value: isinstance(value, dict), settings.values()):
        part.update({name: value for name, value in changes.items() if name in part})
    if model_type in ENCODERS:
        settings |= {"is_decoder": True, "pad_token_id": 0}
    config = CONFIG_MAPPING[model_type](**settings)
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config)
    if (count := sum(parameter.numel() for parameter in shape.parameters())) > MAX_PARAMETERS:
        raise TooBigError(f"{count:,} parameters")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    if model_type == "xmod":
        model.set_default_language("en_XX")
    redraw(model, seed=6)
    model(torch.zeros(1, 4, dtype=torch.long))
    return model


def prompt(length: int) -> Tensor:
    """Return random tokens [1, length]."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(VOCAB - 1, (1, length), generator=generator)


def prompt_lengths(model: PreTrainedModel) -> list[int]:
    """Return lengths of prompts: short, just before and just across what the config names."""
    longest = (context_length(model) or 1 << 30) - NUM_NEW
    near = [n for position in named_positions(model) for n in (position - 3, position + 2)]
    return sorted({SHORT, *(n for n in near if 0 < n <= min(longest, 4 * THRESHOLD))})


def broken_promises(model: PreTrainedModel, *, trees: bool) -> tuple[list[str], list[str]]:
    """Return what differs from what was promised, and what was refused instead of decoded."""
    wrong, refused = list[str](), list[str]()
    seeded = Sampler(temperature=0.9, seed=3)
    greedy = GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0)
    lengths = prompt_lengths(model)
    model.generation_config = GenerationConfig()  # some types force how a text ends
    for length in lengths:
        ids = prompt(length)
        theirs = model.generate(ids, greedy, attention_mask=torch.ones_like(ids))
        try:
            plain = plain_decode(model, ids, max_new_tokens=NUM_NEW)
            drawn = plain_decode(model, ids, max_new_tokens=NUM_NEW, sampler=seeded)
            drafter = ScriptedDrafter(default_tree(3, 9), drawn.sequences[0].tolist(), 0.7)
            guessed = decode(model, drafter, ids, max_new_tokens=NUM_NEW, sampler=seeded)
        except ConfigError as error:
            refused.append(f"a prompt of {length}: {error}")
            continue
        if plain.sequences[0].tolist() != theirs[0].tolist():
            wrong.append(f"not generate's text behind {length} tokens")
        if guessed.new_tokens != drawn.new_tokens:
            wrong.append(f"guesses change the text behind {length} tokens")
    for longest in lengths if trees else []:
        rows = [prompt(n) for n in (longest, max(1, longest // 3), SHORT - 3)]
        try:
            alone = [plain_decode(model, row, max_new_tokens=NUM_NEW).new_tokens for row in rows]
            truth = [row[0].tolist() + text for row, text in zip(rows, alone, strict=True)]
            drafter = ScriptedDrafter(default_tree(3, 9), truth, 0.7)
            together = decode(model, drafter, **padded(rows), max_new_tokens=NUM_NEW)
        except ConfigError as error:
            refused.append(f"a batch: {error}")
            continue
        if [row.new_tokens for row in together.rows] != alone:
            wrong.append(f"a row of a batch differs, the longest of {longest} tokens")
    return wrong, refused


def judge(name: str) -> tuple[str, str]:
    """Return the verdict on a type, and the reason."""
    try:
        model = build(name)
    except Exception as error:  # 190 modelling files, each with its own
        return "not built", f"{type(error).__name__}: {error}"
    try:
        support = tree_support(model)
    except ValueError as error:
        return "refused", str(error)
    wrong, refused = broken_promises(model, trees=support.kind == "tree")
    if wrong:
        return "WRONG", f"{support.kind}, but {'; '.join(wrong)}"
    return support.kind, "; ".join(filter(None, [support.reason, *refused[:1]]))


def expired(*_: object) -> NoReturn:
    """End a type that takes too long."""
    raise TimeoutError(f"took more than {SECONDS} s")


TITLES = {
    "tree": "Trees and batches",
    "chain": "Chains, one row at a time",
    "refused": "Refused",
    "not built": "Not tried",
    "WRONG": "Accepted and wrong",
}


def page(before: str, document: dict[str, Any]) -> str:
    """Return the page of what was found: its text as it was, its version and tables anew."""
    verdicts, head = document["verdicts"], before.partition("| | types |")[0]
    lines = [
        re.sub(r"(?<=transformers )[\w.]+", document["transformers"], head) + "| | types |",
        "|---|---|",
        *(f"| {title} | {len(verdicts.get(key, {}))} |" for key, title in TITLES.items()),
    ]
    for key, title in TITLES.items():
        if found := sorted(verdicts.get(key, {}).items()):
            bare = ", ".join(f"`{name}`" for name, reason in found if not reason)
            rows = [
                f"| `{name}` | {' '.join(reason.split()).replace('|', '/').replace('<', '&lt;')} |"
                for name, reason in found
                if reason
            ]
            lines += ["", f"## {title}", *(["", bare] if bare else [])]
            lines += ["", "| type | |", "|---|---|", *rows] if rows else []
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Judge all types; print and write what was found."""
    given = harness.parse(Settings, argv)
    torch.set_num_threads(1)
    logging.set_verbosity(logging.CRITICAL)
    signal.signal(signal.SIGALRM, expired)
    found: dict[str, dict[str, str]] = {}
    for name in given.types:
        signal.alarm(SECONDS)
        try:
            verdict, reason = judge(name)
        except Exception as error:
            verdict, reason = "WRONG", f"{type(error).__name__}: {error}"
        finally:
            signal.alarm(0)
        found.setdefault(verdict, {})[name] = " ".join(reason.split())[:300]
    found = {verdict: dict(sorted(types.items())) for verdict, types in sorted(found.items())}
    for verdict, types in found.items():
        print(f"\n{verdict}: {len(types)}")
        for name, reason in types.items():
            print(f"  {name:<28}{reason[:160]}".rstrip())
    document = {"transformers": transformers.__version__, "verdicts": found}
    harness.write(given.json, document)
    if given.page:
        given.page.write_text(page(given.page.read_text(), document))
    return int("WRONG" in found)


if __name__ == "__main__":
    raise SystemExit(main())
