"""Medusa checkpoints of others as native exports: the same logits, or a line that says why not."""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from specheads import generate
from specheads.attention.tree import Tree
from specheads.config import ConfigError, GenerateConfig
from specheads.config.main import answering
from specheads.models.base import load_base_model
from specheads.models.checkpoint import load_export, load_heads, read_config, set_tree
from specheads.models.heads import MedusaHeads
from specheads.models.output import OutputLayer
from tests.damaged import damaged, flip, no_hang, replace_value
from tests.medusa_exports import HEADS, SIZE, VOCAB, for_vllm, made, medusa, save
from tests.readers import original_medusa
from tests.readers.original_medusa import Block
from tests.readers.vllm_medusa import Medusa
from tests.toys import full_logits

HIDDEN = torch.randn(2, 5, SIZE, generator=torch.Generator().manual_seed(1))
CLOSE = {"rtol": 0, "atol": 1e-6}


def tensors_of(number: int = 2, layers: int = 1, rows: int | None = VOCAB) -> dict[str, Tensor]:
    """Return the tensors of heads in the original layout; ``rows`` None: of version 2."""
    torch.manual_seed(3)
    found = {}
    for i in range(number):
        for j in range(layers):
            found[f"{i}.{j}.linear.weight"] = torch.randn(SIZE, SIZE) * 0.2
            found[f"{i}.{j}.linear.bias"] = torch.randn(SIZE) * 0.2
        if rows is not None:
            found[f"{i}.{layers}.weight"] = torch.randn(rows, SIZE) * 0.2
    return found


def foreign(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None,
    name: str = "medusa_lm_head.safetensors",
) -> Path:  # fmt: skip
    """Write a foreign folder."""
    folder.mkdir()
    save_file(tensors, folder / name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
def said(folder: Path) -> Tensor:
    """Return the logits of a native export's heads, over the whole vocabulary."""
    export = load_export(folder)
    assert isinstance(export.heads, MedusaHeads)
    output = OutputLayer(export.base.get_output_embeddings())
    return full_logits(export.heads, export.heads.logits(HIDDEN, output))


FORMS = [
    ("own", "vllm", "own"), ("shared", "vllm", "shared"),
    ("shared_pruned", "vllm", "shared_pruned"),
    ("own", "fasterdecoding_v1", "own"), ("shared", "fasterdecoding_v1", "own"),
    ("shared", "fasterdecoding_v2", "shared"), ("own", "merged", "own"),
]  # fmt: skip


@pytest.mark.parametrize("kind,form,after", FORMS)
def test_there_and_back(
    kind: str, form: str, after: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Heads in another order or with another matrix load as well, and no guess is right."""
    heads = medusa(kind, num_layers=2 if form == "vllm" else 1)
    native = save(tmp_path / "native", heads, tiny_model_dir)
    if form == "vllm":
        folder = for_vllm(tmp_path / "foreign", heads, tiny_model_dir)
        torch.testing.assert_close(Medusa(folder).logits(HIDDEN), said(native), **CLOSE)
    else:
        folder = made(native, tmp_path / "foreign", format=form)
    back = made(folder, tmp_path / "back", base=str(tiny_model_dir))
    info = read_config(back)
    assert (info["kind"], info["num_heads"], info["lm_head"]) == ("medusa", HEADS, after)
    assert info["base"] == read_config(native)["base"]
    before, now = said(native), said(back)
    kept = before[0, 0].isfinite()
    torch.testing.assert_close(now[..., kept], before[..., kept], **CLOSE)
    if after == kind:
        torch.testing.assert_close(now, before, **CLOSE)
    # tokens that were left out may be written, but no head may guess them
    assert (now[..., ~kept] < now[..., kept].amax(-1, keepdim=True)).all()


GOLDEN = Path(__file__).parents[1] / "golden" / "export"  # trained heads, a tuned base


@pytest.mark.parametrize("form", ["fasterdecoding_v1", "fasterdecoding_v2", "vllm"])
def test_decoding_is_that_of_the_native_form(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guesses decide nothing but the number of steps: only that shows another head."""
    base = GOLDEN / "base"
    if form == "vllm":
        folder = for_vllm(tmp_path / "foreign", medusa_of(GOLDEN), base)
    else:
        folder = made(GOLDEN, tmp_path / "foreign", format=form)
        base = folder / "base"
    back = made(folder, tmp_path / "back", base=str(base))
    set_tree(back, Tree.from_choices(read_config(GOLDEN)["tree"]["choices"]))
    answers = []
    for checkpoint in (GOLDEN, back):
        capsys.readouterr()
        values = {"checkpoint": str(checkpoint), "prompt": "def add(a, b):", "json": True}
        config = GenerateConfig(**values, max_new_tokens=40)  # type: ignore
        with answering(config):
            generate.run(config)
        answers.append(json.loads(capsys.readouterr().out))
    for key in ("text", "accept_lengths", "num_steps", "new_tokens"):
        assert answers[0][key] == answers[1][key], key
    assert len(set(answers[0]["accept_lengths"])) > 1, "no guess was right"


def medusa_of(checkpoint: Path) -> MedusaHeads:
    """Return the heads of an export."""
    heads = load_heads(checkpoint)
    assert isinstance(heads, MedusaHeads)
    return heads


def test_heads_are_counted_not_believed(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The published configs say 2 heads where the file holds 5: three trained heads are lost."""
    config = {"medusa_num_heads": 2, "medusa_num_layers": 3, "base_model_name_or_path": "x"}
    folder = foreign(tmp_path / "foreign", tensors_of(5, 1), config)
    back = made(folder, tmp_path / "back", base=str(tiny_model_dir))
    printed = capsys.readouterr().out
    assert "5 medusa heads of" in printed
    assert read_config(back)["num_heads"] == 5
    (folder / "config.json").write_text(json.dumps({**config, "medusa_num_heads": 5}))
    config = json.loads((folder / "config.json").read_text())
    assert config["medusa_num_heads"] == 5
    (folder / "config.json").write_text(
        json.dumps({"medusa_num_heads": 5, "num_medusa_heads": 5, "medusa_num_layers": 1})
    )
    expected = original_medusa.logits(original_medusa.v1(folder), HIDDEN)
    torch.testing.assert_close(said(back), expected, **CLOSE)


def test_no_config_and_no_names_in_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    """A folder with tensors alone holds everything that is needed."""
    folder = foreign(tmp_path / "foreign", tensors_of())
    assert read_config(made(folder, tmp_path / "back", base=str(tiny_model_dir)))["num_heads"] == 2


@pytest.mark.parametrize("prefix", ["medusa_heads.", "medusa_head.", "module.medusa_head."])
def test_prefixes_of_savers_are_known(prefix: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Saved from a wrapped model all names have a word in front."""
    tensors = {prefix + name: tensor for name, tensor in tensors_of().items()}
    folder = foreign(tmp_path / "foreign", tensors)
    back = made(folder, tmp_path / "back", base=str(tiny_model_dir))
    plain = foreign(tmp_path / "plain", tensors_of())
    expected = made(plain, tmp_path / "expected", base=str(tiny_model_dir))
    assert torch.equal(said(back), said(expected))


class Repeated(nn.Module):
    """Heads as the original code builds them: one block, several times."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        heads = []
        for _ in range(2):
            same = [Block(SIZE)] * layers
            heads.append(nn.Sequential(*same, nn.Linear(SIZE, VOCAB, bias=False)))
        self.medusa_head = nn.ModuleList(heads)


@pytest.mark.parametrize("how", ["copies", "save_model", "dropped"])
def test_one_block_under_several_names(
    how: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """[Block] * n is one module: savers leave one of its names, and n - 1 layers would be lost."""
    model = Repeated(3)
    folder = tmp_path / "foreign"
    folder.mkdir()
    file = folder / "medusa_lm_head.safetensors"
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if how == "copies":
        save_file(state, file)
    elif how == "save_model":
        save_model(model, str(file))
        assert len(load_file(file)) < len(state)
    else:
        kept = {n: t for n, t in state.items() if n.split(".")[2] not in "12"}
        save_file(kept, file)
    back = made(folder, tmp_path / "back", base=str(tiny_model_dir))
    assert read_config(back)["num_layers"] == 3
    expected = original_medusa.logits(model.medusa_head, HIDDEN)
    torch.testing.assert_close(said(back), expected, **CLOSE)
    printed = capsys.readouterr().out
    assert ("one block stands for 3 of the 3 layers" in printed) == (how == "dropped")
    assert ("under another name" in printed) == (how == "save_model")


def pickled(folder: Path, content: Any) -> Path:
    """Write a folder with a .pt."""
    folder.mkdir()
    torch.save(content, folder / "medusa_lm_head.pt")
    return folder


def test_pickle_is_read_on_request_alone(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The published .pt is what people have; read without being asked, any file could be code."""
    folder = pickled(tmp_path / "foreign", Repeated(2).medusa_head.state_dict())
    base = {"base": str(tiny_model_dir)}
    with pytest.raises(ConfigError, match=r"medusa_lm_head\.pt is pickle: allow_pickle=true"):
        made(folder, tmp_path / "back", **base)
    back = made(folder, tmp_path / "back", allow_pickle=True, **base)
    expected = original_medusa.logits(Repeated(2).medusa_head, HIDDEN)
    torch.testing.assert_close(said(back), expected, **CLOSE)
    assert not list(back.rglob("*.pt"))


class Exploit:
    """What would run a command where pickle is believed."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what unpickling calls."""
        return (Path.touch, (Path("exploded"),))


def test_pickle_runs_no_code_and_claims_no_memory(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's file that is read on request is still a stranger's."""
    monkeypatch.chdir(tmp_path)
    good = tensors_of()
    huge = torch.zeros(1).expand(1 << 20, SIZE)
    for i, (content, message) in enumerate((
        ({**good, "x": Exploit()}, "cannot read .*medusa_lm_head.pt: "),
        ([1, 2], "holds a list, expected tensors by name"),
        ({**good, "0.1.weight": 3}, "'0.1.weight' is a int, expected tensors by name"),
        ({**good, "0.1.weight": huge}, "0.1.weight is larger than what is stored of it"),
        ({**good, "0.1.weight": torch.zeros(3, 3).to_sparse()}, "which no head is made of|cannot"),
        ({**good, "0.1.weight": torch.zeros(VOCAB, SIZE, dtype=torch.int64)}, "holds I64, expec"),
        ({**good, "0.1.weight": good["0.1.weight"] * torch.inf}, "numbers that are not finite"),
    )):  # fmt: skip
        folder = pickled(tmp_path / f"foreign{i}", content)
        with pytest.raises(ConfigError, match=message) as refused:
            made(folder, tmp_path / "back", base=str(tiny_model_dir), allow_pickle=True)
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "back").exists()

    packed = pickled(tmp_path / "packed", {"0.0.linear.weight": torch.zeros(1000, 1000)})
    file = packed / "medusa_lm_head.pt"
    with zipfile.ZipFile(file) as archive:
        inside = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in inside.items():
            archive.writestr(name, data)
    with pytest.raises(ConfigError, match="unpacked .*: no .pt is packed"):
        made(packed, tmp_path / "back", base=str(tiny_model_dir), allow_pickle=True)
    file.write_bytes(b"\x80\x02]q\x00.")
    with pytest.raises(ConfigError, match="is no .pt file of torch 1.6 or newer"):
        made(packed, tmp_path / "back", base=str(tiny_model_dir), allow_pickle=True)


def without(*names: str) -> Callable[[dict[str, Tensor]], None]:
    """Return a change that takes tensors away."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    return change


def with_tensor(name: str, *shape: int) -> Callable[[dict[str, Tensor]], None]:
    """Return a change that adds or replaces a tensor."""
    return lambda tensors: tensors.update({name: torch.zeros(*shape)})


REFUSED: list[tuple[Callable[[dict[str, Tensor]], None], str]] = [
    (with_tensor("0.0.norm.weight", SIZE), "0.0.norm.weight is no tensor of Medusa heads"),
    (with_tensor("extra", 1), "extra is no tensor of Medusa heads"),
    (with_tensor("0.0.linear.weight", SIZE, SIZE + 1), r"has shape \[32, 33\], the base model's"),
    (with_tensor("1.1.weight", VOCAB - 2, SIZE), r"has shape \[270, 32\], the base .* \[272, 32\]"),
    (with_tensor("1.1.weight", VOCAB), r"has shape \[272\], the base model's sizes"),
    (with_tensor("0.5.weight", VOCAB, SIZE), "holds the same tensor under two names"),
    (with_tensor("medusa_head.0.1.weight", VOCAB, SIZE), "the same tensor under two names"),
    (with_tensor("2.0.linear.weight", SIZE, SIZE), "lacks the output matrix of head 2"),
    (with_tensor("900.1.weight", VOCAB, SIZE), "holds 901 heads, expected 1 to 256"),
    (with_tensor("lm_head.weight", VOCAB, SIZE), "holds lm_head.weight and 0.1.weight"),
    (without("0.1.weight"), "lacks the output matrix of head 0"),
    (without("1.0.linear.weight"), "lacks linear.weight of layer 0 of head 1"),
    (without("1.0.linear.bias"), "lacks linear.bias of layer 0 of head 1"),
    (dict.clear, "holds 0 heads"),
]


@pytest.mark.parametrize("change,message", REFUSED, ids=lambda value: getattr(value, "name", ""))
def test_tensors_without_a_place_are_named(
    change: Callable[[dict[str, Tensor]], None], message: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Passed over, one tensor is a head that guesses nothing right, and nobody sees it."""
    tensors = tensors_of()
    change(tensors)
    folder = foreign(tmp_path / "foreign", tensors)
    with pytest.raises(ConfigError, match=message) as refused:
        made(folder, tmp_path / "back", base=str(tiny_model_dir))
    assert "\n" not in str(refused.value) and not (tmp_path / "back").exists()


def test_vllm_folders_as_vllm_understands_them(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prefix, full matrices beside a token map, one matrix for all: each is read by its rule."""
    base = load_base_model(str(tiny_model_dir))
    config = {
        "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": SIZE,
        "vocab_size": VOCAB, "num_heads": 2, "num_hidden_layers": 1, "medusa_fc_bias": True,
    }  # fmt: skip
    blocks = {}
    for name, tensor in tensors_of(rows=None).items():
        head, layer, _, what = name.split(".")
        blocks[f"medusa_heads.blocks.{head}.layers.{layer}.{what}"] = tensor
    whole = {f"lm_heads.{i}.weight": torch.randn(VOCAB, SIZE) * 0.2 for i in range(2)}
    kept, common = torch.randperm(VOCAB)[:50], {"original_lm_head": True}
    short, map_of_50 = {"truncated_vocab_size": 40}, {"truncated_vocab_size": 50}
    cases: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
        "own": (whole, {}, "own"),
        "kept": ({**whole, "token_map": kept}, map_of_50, "pruned"),
        "scaled": (whole, {"logit_scale": 0.5}, "own"),
        "one": ({"lm_heads.0.weight": whole["lm_heads.0.weight"]}, common, "own"),
        "base": ({"lm_head.weight": base.lm_head.weight.detach()}, common, "shared"),
    }  # fmt: skip
    for name, (more, settings, lm_head) in cases.items():
        folder = foreign(
            tmp_path / name, {**blocks, **more}, {**config, **settings}, "model.safetensors"
        )
        back = made(folder, tmp_path / f"{name}_back", base=str(tiny_model_dir))
        assert read_config(back)["lm_head"] == lm_head
        if name == "kept":  # vLLM's code means it so, and then refuses the fewer rows of each head
            expected = torch.full_like(said(tmp_path / "own_back"), -torch.inf)
            expected[..., kept] = said(tmp_path / "own_back")[..., kept]
        else:
            expected = Medusa(folder).logits(HIDDEN)
        torch.testing.assert_close(said(back), expected, **CLOSE)
    capsys.readouterr()
    unbiased = {**config, "medusa_fc_bias": False}
    folder = foreign(tmp_path / "dropped", {**blocks, **whole}, unbiased, "model.safetensors")
    back = made(folder, tmp_path / "dropped_back", base=str(tiny_model_dir))
    assert "which vLLM drops unless config.json says medusa_fc_bias" in capsys.readouterr().out
    assert torch.equal(said(back), said(tmp_path / "own_back"))
    for name, more, settings, message in (
        ("no_map", whole, map_of_50, "lacks token_map, but config.json says"),
        ("short", {**whole, "token_map": kept}, short, "50 different tokens"),
        ("far", {**whole, "token_map": kept + VOCAB}, map_of_50, "expected 50 of 0 to"),
        ("zero", whole, {"logit_scale": 0}, "logit_scale is 0, expected a number above 0"),
        ("sparse", {"lm_heads.1.weight": whole["lm_heads.1.weight"]}, {}, "matrix of head 0"),
    ):  # fmt: skip
        folder = foreign(
            tmp_path / name, {**blocks, **more}, {**config, **settings}, "model.safetensors"
        )
        with pytest.raises(ConfigError, match=message):
            made(folder, tmp_path / "back", base=str(tiny_model_dir))


def test_the_reader_sees_what_vllm_passes_over(tiny_model_dir: Path, tmp_path: Path) -> None:
    """A reader as lenient as the engine would call every folder right."""
    folder = for_vllm(tmp_path / "foreign", medusa(), tiny_model_dir)
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors, settings = load_file(file), json.loads(config.read_text())
    original = {f"0.{name}": tensor for name, tensor in tensors.items()}
    for changed, values, problem in (
        (original, settings, "pass over"),
        (tensors, {**settings, "medusa_fc_bias": False}, "pass over blocks"),
        (dict(list(tensors.items())[1:]), settings, "uninitialised"),
        (tensors, {**settings, "num_attention_heads": 4}, "uninitialised"),
    ):
        save_file(changed, file)
        config.write_text(json.dumps(values))
        with pytest.raises(AssertionError, match=problem):
            Medusa(folder)


def test_a_whole_model_is_its_own_base(
    tiny_model_dir: Path, tmp_path: Path, make_tiny_llama: Callable[..., LlamaForCausalLM],
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Medusa-2 checkpoints are tuned models: their heads over the original guess worse."""
    tuned = make_tiny_llama(seed=5)
    native = save(tmp_path / "native", medusa(), tiny_model_dir, tuned_base=tuned)
    folder = made(native, tmp_path / "merged", format="merged")
    reported: list[logging.LogRecord] = []
    spy = logging.NullHandler()
    monkeypatch.setattr(spy, "handle", reported.append)
    logging.getLogger("transformers").addHandler(spy)
    back = made(folder, tmp_path / "back", base=str(tiny_model_dir))
    logging.getLogger("transformers").removeHandler(spy)
    assert "the model they were in as a tuned" in capsys.readouterr().out
    assert not reported, "transformers calls the heads unexpected"
    export = load_export(back)
    assert export.config["base"]["tuned"] and export.config["base"]["name"] == str(tiny_model_dir)
    for name, tensor in tuned.state_dict().items():
        assert torch.equal(export.base.state_dict()[name], tensor)
    torch.testing.assert_close(said(back), said(native), **CLOSE)
    assert "medusa_num_heads" not in (back / "base" / "config.json").read_text()

    plain = made(save(tmp_path / "same", medusa(), tiny_model_dir), tmp_path / "m", format="merged")
    back = made(plain, tmp_path / "back2", base=str(tiny_model_dir))
    assert f"is {tiny_model_dir} unchanged" in capsys.readouterr().out
    assert not read_config(back)["base"]["tuned"] and not (back / "base").exists()

    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.layers.0.mystery.weight": torch.zeros(2)}, file)
    with pytest.raises(ConfigError, match=r"of no use in its files, first model\.layers\.0\.myst"):
        made(folder, tmp_path / "back3", base=str(tiny_model_dir))
    save_file({**tensors, "medusa_head.0.0.norm.weight": torch.zeros(2)}, file)
    with pytest.raises(ConfigError, match=r"medusa_head\.0\.0\.norm\.weight is no tensor of Med"):
        made(folder, tmp_path / "back3", base=str(tiny_model_dir))


def test_what_is_no_foreign_checkpoint(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The way in is one line away, whatever was mistaken for what."""
    native = save(tmp_path / "native", medusa(), tiny_model_dir)
    heads = foreign(tmp_path / "foreign", tensors_of())
    for checkpoint, settings, message in (
        (native, {}, "is an export of specheads already: leave base= out"),
        (tiny_model_dir, {}, "is no tensor of Medusa heads"),
        (tmp_path, {}, "holds no heads of a known layout"),
        (Path("lmsys/heads"), {}, "there is no such folder; .*: hf download lmsys/heads"),
        (heads, {"format": "plain"}, "base= brings a foreign checkpoint into native"),
        (heads, {"lm_head": "low_rank"}, "base= brings a foreign checkpoint into native"),
        (
            heads,
            {"base": "", "dtype": "float16"},
            "is a checkpoint of others: base=<its base model> brings",
        ),
        (heads, {"base": "/nowhere"}, "/nowhere: there is no such folder"),
        (native, {"base": "", "merge": True, "allow_pickle": True}, "allow_pickle=true is for"),
        (native, {"base": "", "dtype": "float16", "private": True}, "private=true is for push="),
    ):
        values = {"base": str(tiny_model_dir), **settings}
        with pytest.raises(ConfigError, match=message) as refused:
            made(checkpoint, tmp_path / "back", **values)
        assert "\n" not in str(refused.value) and not (tmp_path / "back").exists()


def test_precision_is_kept_or_asked_for(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Published heads are in half precision: written wider they take twice the disk."""
    halves = {name: tensor.half() for name, tensor in tensors_of().items()}
    folder = foreign(tmp_path / "foreign", halves)
    for settings, expected in (({}, torch.float16), ({"dtype": "bfloat16"}, torch.bfloat16)):
        back = made(folder, tmp_path / str(expected), base=str(tiny_model_dir), **settings)
        assert {each.dtype for each in load_heads(back).parameters()} == {expected}


@pytest.mark.parametrize("form", ["vllm", "fasterdecoding_v1"])
def test_damage_is_one_line(form: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    """A stranger's folder may hold anything: no traceback, no endless wait, nothing half done."""
    if form == "vllm":
        folder = for_vllm(tmp_path / "foreign", medusa("shared_pruned"), tiny_model_dir)
    else:
        native = save(tmp_path / "native", medusa(), tiny_model_dir)
        folder = made(native, tmp_path / "foreign", format=form)
    random, refused = Random(5), 0
    for number in range(20):
        file = folder / ("config.json" if number % 2 else next(folder.glob("*.safetensors")).name)
        data = file.read_bytes()
        content = (
            replace_value(data.decode(), random).encode() if number % 2 else flip(data, random)
        )
        with damaged(file, content), no_hang():
            try:
                made(folder, tmp_path / f"back{number}", base=str(tiny_model_dir))
            except ConfigError as error:
                refused += 1
                assert "\n" not in str(error) and len(str(error)) < 700
                assert not (tmp_path / f"back{number}").exists()
    assert 2 < refused < 20
