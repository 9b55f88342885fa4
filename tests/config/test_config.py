"""Settings: every mistake is one line that names the key; every shipped YAML composes."""

from __future__ import annotations

import importlib.util
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from specheads import pipeline
from specheads.config import (
    BenchConfig,
    ChatConfig,
    CompareConfig,
    ConfigError,
    DataConfig,
    DoctorConfig,
    ExportConfig,
    FeaturesConfig,
    GenerateConfig,
    HeadsConfig,
    ModelConfig,
    QualityConfig,
    RegenerateConfig,
    SpecBenchConfig,
    TrainConfig,
    TreeSearchConfig,
    export_of,
    to_config,
)
from specheads.config.compose import swept
from specheads.config.main import tidy_arguments
from specheads.models.base import torch_dtype
from specheads.system.files import conf_dir, recipes_dir
from specheads.train import load_recipe, train
from tests.composed import composed as compose


def composed(*overrides: str) -> TrainConfig:
    """Compose conf/train.yaml as the command line would."""
    found = compose("train", overrides)
    assert isinstance(found, TrainConfig)
    return found


def options(group: str) -> list[str]:
    """Return the options of a config group."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


@pytest.mark.parametrize("recipe", options("recipe"))
def test_every_recipe_composes_and_names_a_function(recipe: str) -> None:
    """A YAML that drifted from its program fails only after the model has loaded."""
    assert callable(load_recipe(composed(f"+recipe={recipe}").recipe))


def test_every_recipe_program_has_settings() -> None:
    """A program without a YAML cannot be started by name."""
    programs = {path.stem for path in recipes_dir().glob("*.py")}
    assert programs <= set(options("recipe"))
    for name in options("recipe"):  # several may start one program
        assert composed(f"+recipe={name}").recipe in programs


GROUPS = ("model", "adapter", "data", "heads", "optim", "deepspeed", "+debug")


@pytest.mark.parametrize(
    "overrides",  # one of every group at a time
    zip_longest(*([f"{group}={each}" for each in options(group.strip("+"))] for group in GROUPS)),
)
def test_every_option_composes(overrides: tuple[str | None, ...]) -> None:
    """An option with a key that no dataclass has would only fail for its first user."""
    files = dict.fromkeys(("data=jsonl", "data=parquet", "data=hub"), ["data.path=mine"])
    needed = {**files, "data=mixture": ["data.mixture=[{source: pycode, kinds: [next]}]"]}
    given = [each for each in overrides if each]
    composed("+recipe=medusa1", *given, *(more for each in given for more in needed.get(each, [])))


def test_every_yaml_opens_with_its_command() -> None:
    """The command line at the top is the documentation of a YAML."""
    for path in conf_dir().rglob("*.yaml"):
        head = "".join(path.read_text().splitlines(keepends=True)[:4])
        assert "specheads." in head or "+recipe=" in head, path


def test_later_settings_win() -> None:
    """A recipe that beats the command line makes settings silently ineffective."""
    cfg = composed("+recipe=medusa2", "+debug=cpu", "optim.lr=0.5", "steps=7")
    assert (cfg.steps, cfg.optim.lr, cfg.name) == (7, 0.5, "debug")
    assert cfg.optim.name == "muon"


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("optim", {"lrr": 1}, "unknown key optim.lrr; did you mean optim.lr?"),
        ("optim", {"lr": -1.0}, "optim.lr must be at least 0, got -1.0"),
        ("zzz", 1, "unknown key zzz"),
        (
            "loss",
            {"lambda_schedule": "cos"},
            "loss.lambda_schedule must be one of constant, linear, sine",
        ),
        ("steps", "many", "Value 'many' of type 'str' could not be converted to Integer"),
    ],
)
def test_mistakes_are_one_line(key: str, value: object, line: str) -> None:
    """`+optim.lrr=1` slips past Hydra and would train with the default instead."""
    cfg = OmegaConf.create({"recipe": "medusa1", "run_dir": "x", key: value})
    with pytest.raises(ConfigError) as caught:
        to_config(cfg, TrainConfig)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_values_are_named() -> None:
    """OmegaConf's own message for a missing value names no key."""
    with pytest.raises(ConfigError, match="no value given for run_dir"):
        to_config(OmegaConf.create({"recipe": "medusa1", "run_dir": "???"}), TrainConfig)


def test_settings_that_exclude_each_other() -> None:
    """Shared heads without blocks would have nothing to train, and train for hours."""
    with pytest.raises(ConfigError, match="nothing would be trained"):
        HeadsConfig(num_layers=0, lm_head="shared")
    with pytest.raises(ConfigError, match="data.growth"):
        DataConfig(seq_len=512, growth=[[512, 0.5]])
    DataConfig(seq_len=512, growth=[[128, 0.5], [256, 0.75]])


@pytest.mark.parametrize("schema", [
    BenchConfig, ChatConfig, CompareConfig, DoctorConfig, ExportConfig, GenerateConfig, ModelConfig,
    QualityConfig, RegenerateConfig, SpecBenchConfig, TreeSearchConfig,
])  # fmt: skip
def test_short_names_of_dtypes(schema: Any) -> None:
    """Two names for one dtype must compare equal, or a resumed run is refused for nothing."""
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "float16": "float16"}
    assert [schema(dtype=name).dtype for name in names] == [*names.values()]
    with pytest.raises(ConfigError, match=r"dtype must be one of .*float16, got 'bf61'"):
        schema(dtype="bf61")


def test_short_names_of_dtypes_elsewhere() -> None:
    """A name that works for the model and not for its matrix products looks like a mistake."""
    assert FeaturesConfig(dtype="bf16").dtype == TrainConfig(autocast="bf16").autocast == "bfloat16"
    assert torch_dtype("bf16") is torch.bfloat16 and torch_dtype("fp32") is torch.float32


@pytest.mark.parametrize(("seq_len", "growth"), [(128, [256, 0.85]), (300, [200, 0.5])])
def test_rows_that_do_not_fit_their_growth(seq_len: int, growth: list[float]) -> None:
    """Who sets data.seq_len with a recipe that grows rows never wrote data.growth."""
    cure = rf"data.seq_len={seq_len} does not fit data.growth=.* write data.growth=\[\]"
    with pytest.raises(ConfigError, match=cure):
        DataConfig(seq_len=seq_len, growth=[growth])
    assert composed("+recipe=mtp", "data.seq_len=128", "data.growth=[]").data.seq_len == 128


def test_a_run_directory_stands_for_its_export(tmp_path: Path) -> None:
    """The folder that train names is not the one that every other command wants."""
    run = tmp_path / "mine"
    run.mkdir()
    assert export_of(str(run)) == str(run), "any folder"
    (run / "config.yaml").write_text("name: mine\n")
    with pytest.raises(ConfigError, match="mine is a run directory without an export.*resume=auto"):
        export_of(str(run))
    (run / "export").mkdir()
    cfg = OmegaConf.create(
        {
            "checkpoint": str(run),
            "exports": [str(run), "tinycode"],
            "decode": {"drafter": "draft", "draft": str(run)},
        }
    )
    found = to_config(cfg, BenchConfig)
    assert found.checkpoint == found.decode.draft == found.exports[0] == str(run / "export")
    assert found.exports[1] == "tinycode"
    (run / "config.json").write_text("{}")
    assert export_of(str(run)) == str(run), "a model of one's own that is called export inside"


def test_the_name_of_a_run_in_a_sweep_is_a_file_name() -> None:
    """Two values that differ in a sign no folder can have must not share a folder."""
    assert swept("optim.lr=0.001,seed=1", 0) == "optim.lr=0.001,seed=1"
    assert swept("+recipe=medusa1", 2) == "recipe=medusa1"
    names = [swept(f"data.path=/tmp/{name}", i) for i, name in enumerate(("a b", "a/b", "a?b"))]
    assert len(set(names)) == 3 and not set("/ ?") & set("".join(names))
    assert len(swept("x=" + "y" * 500, 0)) < 120
    assert tidy_arguments(["-m", "recipe=a,b", "seed=1", "optim.lr=1,2"]) == [
        "-m", "+recipe=a,b", "seed=1", "optim.lr=1,2",
        "hydra.job.config.override_dirname.exclude_keys=['seed']",
    ]  # fmt: skip


def test_a_folder_or_hub_name_is_a_model() -> None:
    """`model=gpt2` would otherwise be looked up as a file of conf/model, and not be found."""
    given = ["model=/a/b c", "model=org/name", "model=gpt2", "model=tinycode,llama3_8b"]
    given += ["data.path=/x", "model.name=/y"]
    expected = ["model.name='/a/b c'", "model.name=org/name", "model.name=gpt2", *given[3:]]
    assert tidy_arguments(given) == expected
    assert tidy_arguments(["a=1", "-m", "b=1,2"])[:3] == ["-m", "a=1", "b=1,2"]


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    """The path of a user's recipe must not be looked up in the package."""
    mine = tmp_path / "mine.py"
    mine.write_text("def run(cfg):\n    return cfg\n")
    assert callable(load_recipe(str(mine)))
    mine.write_text("x = 1\n")
    with pytest.raises(ConfigError, match="no function run"):
        load_recipe(str(mine))
    with pytest.raises(ConfigError, match="there is no file"):
        load_recipe("medusa9")


def test_columns_are_given_as_they_are_written() -> None:
    """Hydra refuses new keys in a dict, and its advice, a plus sign, is refused elsewhere."""
    given = ["data.columns={user: question, assistant: a+b}", "data.columns.system=s"]
    cfg = composed("+recipe=medusa1", *given)
    assert cfg.data.columns == {"user": "question", "assistant": "a+b", "system": "s"}


def test_a_file_is_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`data=my.jsonl` would otherwise be looked up as a file of conf/data, and not be found.

    One command's `data` is a path itself, and is left alone.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "many").mkdir()
    (tmp_path / "csv").touch()
    for given, source, path in (
        ("my.jsonl", "jsonl", "my.jsonl"),
        ("my.jsonl.gz", "jsonl", "my.jsonl.gz"),
        ("/a/b c.json", "jsonl", "'/a/b c.json'"),
        ("x/y.parquet", "parquet", "x/y.parquet"),
        ("many", "parquet", "many"),
    ):
        assert tidy_arguments([f"data={given}"]) == [f"data={source}", f"data.path={path}"]
        assert tidy_arguments([f"data={given}"], data_group=False) == [f"data={given}"]
    for kept in ("data=pycode", "data=jsonl,hub", "data=unknown", "data.path=my.jsonl"):
        assert tidy_arguments([kept]) == [kept]
    for wrong in ("my.csv", "csv", "none/such"):
        with pytest.raises(ConfigError, match=rf"^data={wrong}: expected a file that ends in .jso"):
            tidy_arguments([f"data={wrong}"])


@pytest.mark.parametrize(
    ("module", "words", "extra"),
    [
        ("peft", ["+recipe=medusa2", "adapter=lora"], "train"),
        ("deepspeed", ["+recipe=medusa1", "deepspeed=zero1"], "deepspeed"),
        ("bitsandbytes", ["+recipe=medusa1", "model.quantization=nf4"], "quant"),
        ("bitsandbytes", ["+recipe=medusa1", "optim=adamw8bit"], "quant"),
    ],
)
def test_a_missing_extra_is_named_before_anything_is_loaded(
    module: str, words: list[str], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour's run that ends in a ModuleNotFoundError, and a guess at the package's name."""
    monkeypatch.setattr(pipeline, "run_recipe", lambda *given: pytest.fail("the run was begun"))
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == module else real(name)
    )
    with pytest.raises(ConfigError, match=rf"needs {module}: pip install 'specheads\[{extra}\]'"):
        train(compose("train", words))
