"""DFlash, DSpark and EAGLE-3 as engines read them, in two layouts, written and brought in.

``speculators`` is the layout of the trainer of that name, which vLLM reads: one config for all
kinds, whose ``speculators_model_type`` says which. ``native`` is that of the methods' first code,
which SGLang reads: a config per kind, as of a model. Tensors have the same names in both, but for
EAGLE-3's layer. llama.cpp's converter takes both of EAGLE-3 and DSpark, and of DFlash the native
one where the vocabulary is not reduced.

Three numbers are counted otherwise than here, and no engine notices an error in them: ``native``
DFlash counts tapped layers from 0, as we do, all others the states behind them, one more; ``d2t``
holds, for every token of a reduced vocabulary, how far its id lies from its place; a block counts
the root's slot, also where that guesses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config import ConfigError
from specheads.formats import serving
from specheads.formats.head_files import MOST_LAYERS, check_number, check_shape
from specheads.formats.medusa import check_output, times
from specheads.formats.serving import Job, Serving
from specheads.models import manifest
from specheads.models.base import context_length
from specheads.models.block import BlockForm, BlockHeads
from specheads.models.checkpoint import cast_tensors, load_export, load_heads
from specheads.models.eagle import EagleForm, EagleHeads
from specheads.models.manifest import expect, said_of, save_tensors, write_json
from specheads.models.output import OutputLayer, layers_of, output_layer
from specheads.models.tapped import TappedHeads
from specheads.system.errors import refuse
from specheads.system.files import whole_folder

FORMATS = ("dflash", "dspark", "eagle3")
LAYOUTS = ("speculators", "native")
_VERSION = "0.9.0"  # of speculators, whose configs these are
_ARCHITECTURES = {
    "dflash": ("DFlashSpeculator", "DFlashDraftModel"),
    "dspark": ("DSparkSpeculator", "Qwen3DSparkModel"),
    "eagle3": ("Eagle3Speculator", "LlamaForCausalLMEagle3"),
}
_STEPS = 5  # of an EAGLE-3 head whose config names no number
# how names begin, ours and theirs; of EAGLE-3's layer in either layout
_NAMES = {
    "output.lm_head.": "lm_head.",
    "markov.down.": "markov_head.markov_w1.",
    "markov.up.": "markov_head.markov_w2.",
}
_LAYER = ("layers.0.", "midlayer.")
# what is not brought in: a head that says where to stop, and what follows from the rest
_LEFT = ("confidence_head.", "t2d", "mask_embedding")
# sections of a config that hold some of what others have at its top
_NESTED = ("transformer_layer_config", "dflash_config", "eagle_config", "speculators_config")
_TAPPED = "the layers that are tapped"
_SIZES = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rope_theta",
    "rms_norm_eps",
)  # fmt: skip
_EAGLE_KEYS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def _check(job: Job) -> None:
    """Refuse heads that a format has no place for, from config.json alone.

    Raises:
        ConfigError: with what is in the way.
    """
    info, form = job.info, job.info["form"]
    anchored, markov = form.get("sample_from_anchor", True), info.get("markov_rank", 0) > 0
    own_matrix = info["kind"] == "block" and info["lm_head"] == "own"
    dflash, dspark, native = job.form == "dflash", job.form == "dspark", job.layout == "native"
    final = "are tapped at the base's final state, which engines see before its last norm"
    problems = {
        "are of the joined form, which specheads alone decodes": form.get("form") == "joined",
        "look back through a window that is counted from the root": form.get("window", 0) > 0,
        "have a matrix of their own for all tokens; engines take the base's (shared)": own_matrix,
        final: -1 in form["taps"],
        "have a Markov correction, which format=dspark holds": dflash and markov,
        "guess from the root's slot, which layout=native has no key for": (
            dflash and native and anchored
        ),
        "have no Markov correction: format=dflash holds them": dspark and not markov,
        "do not guess from the root's slot, as DSpark does": dspark and not anchored,
    }
    those = f"format={job.form}: those of {job.checkpoint}"
    refuse({f"{those} {problem}": there for problem, there in problems.items()})


def write(job: Job) -> list[str]:
    """Write an export in one of the formats; the base itself is not written."""
    _check(job)
    base_model = load_export(job.checkpoint, dtype=job.dtype, device="cpu").base
    heads = cast(TappedHeads, load_heads(job.checkpoint))  # in the precision they are stored in
    output = output_layer(base_model)
    notes = check_output(output, job.form)
    tensors = cast_tensors(dict(_tensors(job.form, job.layout, heads, output)), job.dtype)
    with whole_folder(job.output) as folder:
        save_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
        base = serving.base_name(job.info, "")
        write_json(folder / "config.json", _config(job.form, job.layout, heads, base_model, base))
    return notes


@torch.no_grad()
def _tensors(
    form: str, layout: str, heads: TappedHeads, output: OutputLayer
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by their names in a layout."""
    for name, tensor in heads.state_dict().items():
        if name == "token_map":
            continue
        if name == "output.lm_head.weight":
            tensor = times(tensor, output.scale)
        yield _their_name(name, form, layout), tensor
    reduced = heads.num_outputs < heads.vocab_size
    # engines share the base's matrix with a block, and give EAGLE-3 none
    if "shared" in heads.lm_head and (reduced or form == "eagle3"):
        yield "lm_head.weight", times(heads.shared_rows(output.weight), output.scale)
    if reduced:
        assert heads.token_map is not None
        ids = heads.token_map.cpu()
        yield "d2t", ids - torch.arange(len(ids))
        yield "t2d", torch.zeros(heads.vocab_size, dtype=torch.bool).index_fill(0, ids, True)


def _their_name(name: str, form: str, layout: str) -> str:
    names = _NAMES
    if form == "eagle3":
        layer = _LAYER[LAYOUTS.index(layout)]
        names = {**_NAMES, "layer.": layer, "hidden_norm.": f"{layer}hidden_norm."}
    for ours, theirs in names.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def _config(
    kind: str, layout: str, heads: TappedHeads, base: PreTrainedModel, name: str
) -> dict[str, Any]:
    """Return the config.json, every key written whose default readers differ about."""
    form = cast(Any, heads.form)
    eagle = kind == "eagle3"
    num_layers = 1 if eagle else cast(BlockHeads, heads).num_inner
    layer = {
        "model_type": "llama" if eagle else "qwen3",
        "hidden_size": heads.hidden_size,
        **{key: getattr(form, key) for key in _SIZES},
        "num_hidden_layers": num_layers,
        "vocab_size": heads.vocab_size,
        "max_position_embeddings": context_length(base) or 1 << 17,
        "rope_parameters": {"rope_type": "default", "rope_theta": form.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    behind = [tap + 1 for tap in form.taps]
    # what all layouts say of the heads, and what speculators says besides
    if eagle:
        own: dict[str, Any] = {key: getattr(form, key) for key in _EAGLE_KEYS}
        besides = {"embed_requires_grad": False}
        layer["num_aux_hidden_states"] = len(behind)  # of speculators' layout vLLM believes 3
    else:
        layer["layer_types"] = ["full_attention"] * num_layers
        own = {"block_size": cast(BlockHeads, heads).num_slots, "mask_token_id": form.mask_token_id}
        # inside a block attention goes both ways
        besides = {"sample_from_anchor": form.sample_from_anchor, "sliding_window_non_causal": True}
    if kind == "dspark":
        own |= {
            "markov_rank": cast(BlockHeads, heads).markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
            "confidence_head_with_markov": False,
        }
    architecture = _ARCHITECTURES[kind][LAYOUTS.index(layout)]
    common = {"architectures": [architecture], "draft_vocab_size": heads.num_outputs}
    if layout == "speculators":
        taps = "eagle_aux_hidden_state_layer_ids" if eagle else "aux_hidden_state_layer_ids"
        verifier = list(base.config.architectures or [type(base).__name__])
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": heads.num_heads,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        return {
            **common,
            **own,
            **besides,
            "speculators_model_type": kind,
            "speculators_version": _VERSION,
            taps: behind,
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "transformer_layer_config": layer,
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": name, "architectures": verifier},
            },
        }
    target_layers = base.config.get_text_config().num_hidden_layers
    config = {**layer, **common, "num_target_layers": target_layers}
    if eagle:
        # SGLang reads the ids inside, llama.cpp outside, and guesses what is not there
        ids = {"eagle_aux_hidden_state_layer_ids": behind, "use_aux_hidden_state": True}
        return {**config, **own, **ids, "eagle_config": {**ids, **own}}
    if kind == "dspark":
        return {**config, **own, "target_layer_ids": list(form.taps)}
    mask = own.pop("mask_token_id")
    dflash = {"mask_token_id": mask, "target_layer_ids": list(form.taps), "causal": False}
    return {**config, **own, "dflash_config": dflash}


def serve(kind: str, place: str, base: str, info: dict[str, Any]) -> list[Serving]:
    """Return how engines serve a folder in the format ``kind``."""
    num = info["num_heads"]
    steps = num if kind == "eagle3" else 0
    sglang = serving.sglang(base, kind.upper(), steps, draft_model_path=place)
    tensorrt = Serving("TensorRT-LLM", "", "its documents name no such checkpoint")
    if method := {"eagle3": "Eagle3", "dflash": "DFlash"}.get(kind):
        about = {"decoding_type": method, "max_draft_len": num, "speculative_model": place}
        tensorrt = serving.tensorrt(base, **about)
    options = f"base.gguf -md draft.gguf --spec-type draft-{kind} --spec-draft-n-max {num}"
    given = serving.speculative(kind, num, place)
    takes = "; of layout=native, without a reduced vocabulary" if kind == "dflash" else ""
    needs = "; needs vLLM's second model runner (a GPU)" if kind == "dspark" else ""
    return [
        serving.vllm(base, given, f"a chain of guesses, no tree{needs}"),
        sglang._replace(note="layout=native is what it reads"),
        tensorrt,
        serving.llama_cpp(options, f"{base} and for {place} (--target-model-dir {base}){takes}"),
    ]


class Layout:
    """A drafter of others: what its config says, and the files with its tensors.

    Attributes:
        files: that hold the tensors.
        about: its config.json.
        kind: ``dflash``, ``dspark`` or ``eagle3``, as :func:`kind_of` says.
        config: what that says, that of the layer, and what else is nested, in one.
        heads: without memory, as the config describes them, once the sizes are checked.
        names: of their tensors in the files, by ours.
        notes: what the user has to know, in lines.
    """

    heads: TappedHeads
    names: dict[str, str]

    def __init__(self, files: manifest.TensorFiles, config: dict[str, Any]) -> None:
        self.files, self.kind, self.notes = files, kind_of(config), list(files.notes)
        self.about = files.where.parent / "config.json"
        self.config = {key: value for key, value in config.items() if key not in _NESTED}
        for key in _NESTED:
            inner = config.get(key) or {}
            with said_of(self.about):
                expect(isinstance(inner, dict), key, inner, "an object")
            # what stands outside is the drafter's own, but for the layer's sizes
            self.config = {**inner, **self.config}
        methods = self.config.get("proposal_methods")
        if isinstance(methods, list) and methods and isinstance(methods[0], dict):
            self.config["speculative_tokens"] = methods[0].get("speculative_tokens")

    def check_sizes(self, hidden_size: int, vocab_size: int) -> None:
        """Hold names and shapes of all tensors to what the config and a base model's sizes say.

        Raises:
            ConfigError: with the first key or tensor that is unknown, missing or of another size.
        """
        # one line, whatever a stranger has written there; and without memory
        with said_of(self.about, AttributeError, TypeError), torch.device("meta"):
            self.heads = self._described(hidden_size, vocab_size)
        layout = LAYOUTS[any(name.startswith(_LAYER[1]) for name in self.files.header)]
        shapes = {name: tuple(tensor.shape) for name, tensor in self.heads.state_dict().items()}
        shapes.pop("token_map", None)
        self.names = {name: _their_name(name, self.kind, layout) for name in shapes}
        known = {self.names[name]: shape for name, shape in shapes.items()}
        where = self.files.where
        for name in sorted(self.files.header):
            if name.startswith(_LEFT) or name in ("d2t", "embed_tokens.weight"):
                continue
            if name not in known:
                raise ConfigError(f"{where}: {name:.120} is no tensor of a {self.kind} drafter")
            check_shape(self.files, name, known[name])
        if missing := sorted(known.keys() - self.files.header.keys()):
            raise ConfigError(f"{where} lacks {missing[0]}")
        if any(name.startswith("confidence_head.") for name in self.files.header):
            self.notes.append(
                "its confidence head is left out: trees here are grown by probability"
            )

    @torch.no_grad()
    def read(self, base: PreTrainedModel) -> TappedHeads:
        """Read the heads, whose logits are the same over ``base``; their sizes were checked.

        Raises:
            ConfigError: if their logits cannot be had.
        """
        output = output_layer(base)
        taps, layers = self._taps(), len(layers_of(base))
        with said_of(self.about):
            expect(max(taps) < layers, _TAPPED, taps, f"layers of the base's {layers}")
        self.notes += check_output(output)
        if "embed_tokens.weight" in self.files.header:
            own = self.files.read(["embed_tokens.weight"])["embed_tokens.weight"]
            theirs = cast(Tensor, base.get_input_embeddings().weight)
            if own.shape != theirs.shape or not torch.equal(own.to(theirs.dtype), theirs):
                raise ConfigError(
                    f"{self.files.where}: embed_tokens.weight is not the base's embedding, which"
                    " the heads of a native export read"
                )
        heads, found = self.heads, self.files.read(self.names.values())
        state = {name: found[there] for name, there in self.names.items()}
        if "output.lm_head.weight" in state:
            state["output.lm_head.weight"] = times(state["output.lm_head.weight"], 1 / output.scale)
        if heads.token_map is not None:
            state["token_map"] = self._kept(heads.num_outputs, heads.vocab_size)
        heads.load_state_dict(state, assign=True)
        return heads

    def _kept(self, num_kept: int, vocab_size: int) -> Tensor:
        """Return the token ids of the reduced vocabulary, ``d2t`` added to the places."""
        shape, dtype = self.files.header.get("d2t", ((), ""))
        if shape != (num_kept,) or dtype not in ("I64", "I32"):
            raise ConfigError(
                f"{self.files.where}: d2t is {dtype or 'missing'} of shape {list(shape)}, expected"
                f" {num_kept} whole numbers, as draft_vocab_size says"
            )
        ids = self.files.read(["d2t"])["d2t"].long() + torch.arange(num_kept)
        what = f"{self.files.where}: d2t, how far each token's id lies from its place,"
        manifest.check_ids(what, ids, vocab_size, num_kept)
        return ids

    def _described(self, hidden_size: int, vocab_size: int) -> TappedHeads:
        config, eagle = self.config, self.kind == "eagle3"
        get = config.get
        rope = get("rope_parameters") or get("rope_scaling") or {}
        theta = get("rope_theta") or rope.get("rope_theta", 10_000.0)
        expected = {
            "hidden_size": hidden_size, "vocab_size": vocab_size, "attention_bias": False,
            "hidden_act": "silu", "markov_head_type": "vanilla", "projector_type": "dflash",
            "target_hidden_size": hidden_size,
        }  # fmt: skip
        for key, wanted in expected.items():
            fits = get(key) is None or get(key) == wanted
            expect(fits, key, get(key), f"{wanted!r}: heads of specheads have no other")
        plain = rope.get("rope_type", rope.get("type", "default")) == "default"
        expect(plain, "rope_parameters", rope, "plain rotary positions")
        types = get("layer_types") or ()
        expect("sliding_attention" not in types, "layer_types", types, "full attention")
        num_heads = get("num_attention_heads")
        sizes = {
            "taps": tuple(self._taps()),
            "num_attention_heads": num_heads,
            "num_key_value_heads": get("num_key_value_heads") or num_heads,
            "head_dim": get("head_dim") or hidden_size // (num_heads or 1),
            "intermediate_size": get("intermediate_size"),
            "rope_theta": theta,
            "rms_norm_eps": get("rms_norm_eps", 1e-6),
        }
        kept = get("draft_vocab_size") or vocab_size
        reduced = kept < vocab_size or "d2t" in self.files.header
        own = "lm_head.weight" in self.files.header
        lm_head = "pruned" if reduced else "own" if own else "shared"
        kept = kept if reduced else 0
        if eagle:
            norms = {key: bool(get(key, False)) for key in _EAGLE_KEYS}
            form = EagleForm.stored({**sizes, **norms, "num_taps": len(sizes["taps"])})
            number = get("speculative_tokens") or _STEPS
            check_number(self.files, number)
            return EagleHeads(number, hidden_size, vocab_size, lm_head, form, kept)
        anchored = bool(get("sample_from_anchor", self.kind == "dspark"))
        more = {"form": "published", "sample_from_anchor": anchored}
        more["mask_token_id"] = get("mask_token_id") or 0
        block = BlockForm.stored({**sizes, **more, "num_taps": len(sizes["taps"])})
        number, layers = get("block_size", 0) - (not anchored), get("num_hidden_layers", 1)
        check_number(self.files, number)
        rank = get("markov_rank", 0) if self.kind == "dspark" else 0
        fits = 1 <= layers <= MOST_LAYERS
        expect(fits, "num_hidden_layers", layers, f"1 to {MOST_LAYERS}")
        expect(0 <= rank <= hidden_size, "markov_rank", rank, f"0 to {hidden_size}")
        common = number, hidden_size, vocab_size, lm_head, block, kept
        return BlockHeads(*common, num_layers=layers, markov_rank=rank)

    def _taps(self) -> list[int]:
        """Return the tapped layers, counted from 0."""
        config = self.config
        counted: Any = config.get("target_layer_ids")
        if counted is None:
            behind: Any = config.get("eagle_aux_hidden_state_layer_ids")
            behind = config.get("aux_hidden_state_layer_ids") if behind is None else behind
            counted = [each - 1 for each in behind] if _whole(behind) else behind
        fits = _whole(counted) and min(counted, default=-1) >= 0
        expect(fits, _TAPPED, counted, "numbers of layers of the base")
        return list(counted)


def _whole(values: object) -> bool:
    return isinstance(values, list) and all(type(each) is int for each in values)


def kind_of(config: dict[str, Any]) -> str:
    """Return which of ``FORMATS`` a config.json describes; empty for none."""
    kind = config.get("speculators_model_type")
    if kind in FORMATS:
        return str(kind)
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else ""
    return next((kind for kind, names in _ARCHITECTURES.items() if first in names), "")
