"""The settings of data: which records there are, and how they become rows of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

from specheads.config.declared import Section, at_least, one_of, within
from specheads.system import errors
from specheads.system.errors import DTYPES, ConfigError, check

SOURCES = ("pycode", "jsonl", "parquet", "hub", "mixture")
# what data.path has to be, of the sources that read one
_PATHS = {
    "jsonl": "a .jsonl file",
    "parquet": "a .parquet file or a folder of them",
    "hub": "the name of a data set",
}


@dataclass
class DataConfig(Section):
    """Which records, and how they become fixed-length rows."""

    # pycode (the Python source on this machine), jsonl, parquet, hub (a datasets name), mixture
    source: str = one_of(*SOURCES)
    path: str | None = None  # jsonl (.gz too), parquet: the training file; hub: the set's name
    eval_path: str | None = None  # jsonl, parquet: held-out file; None holds out eval_fraction
    eval_fraction: float = within("(0, 1)", 0.05)
    subset: str | None = None  # hub: which configuration of the data set
    split: str = "train"  # hub: the split to train on
    eval_split: str | None = None  # hub: the split to hold out; None holds out eval_fraction
    revision: str | None = None  # hub: branch, tag or commit
    # jsonl, parquet, hub: read while training, without holding (or downloading) all records
    streaming: bool = False
    # streaming: rows that are shuffled together, and held in memory
    shuffle_buffer: int = at_least(1, 10_000)
    max_row_bytes: int = at_least(1, 16 << 20)  # a larger row is a bad one, and is never parsed
    # names of the file's columns where they are not ours, e.g. {prompt: instruction}
    columns: dict[str, str] = field(default_factory=dict)
    # mixture: [{source: jsonl, path: a.jsonl, weight: 0.7}, ...]; weight is the share of records
    mixture: list[Any] = field(default_factory=list)
    # of records that cannot be read, before the run is refused
    max_bad_fraction: float = within("[0, 1]", 0.05)
    kinds: list[str] = field(default_factory=list)  # pycode: kinds of pairs; empty means all
    # pycode: share of tokens that come from whole documents
    documents: float = within("[0, 1]", 0.0)
    packages: list[str] = field(default_factory=list)  # pycode: empty means the default list
    max_records: int = 0  # 0: all
    seq_len: int = at_least(2, 512)  # tokens per packed row
    # pretrain: shorter rows first, e.g. [[512, 0.7], [1024, 0.9]]: 512 for 70% of the steps
    growth: list[Any] = field(default_factory=list)
    rows: int = at_least(1, 16)  # rows per micro-batch and rank

    def _check_together(self) -> None:
        from_files, on_hub = self.source in _PATHS, self.source == "hub"
        self.check(self.path or not from_files, "path", _PATHS.get(self.source, ""))
        held = f"false with data.source={self.source}, which is held in memory"
        self.check(from_files or not self.streaming, "streaming", held)
        hub = "left out with data.source=hub, which has data.eval_split"
        self.check(not (on_hub and self.eval_path), "eval_path", hub)
        file = "left out unless data.source=hub; there is data.eval_path"
        self.check(on_hub or not self.eval_split, "eval_split", file)
        self._check_growth()
        if self.source == "mixture":
            self.check(self.mixture, "mixture", "[{source: ..., path: ..., weight: ...}, ...]")
            mixture_parts(self)

    def _check_growth(self) -> None:
        stages = [*self.growth, [self.seq_len, 1.0]]
        rising = (
            all(len(stage) == 2 for stage in stages)
            and all(0 < a[0] < b[0] for a, b in pairwise(stages[:-1]))
            and all(0 < a[1] < b[1] for a, b in pairwise(stages))
        )
        expected = "[divisor of data.seq_len, share of the steps until then], both rising"
        self.check(rising, "growth", expected)
        if any(not 0 < length < self.seq_len or self.seq_len % length for length, _ in self.growth):
            raise ConfigError(
                f"data.seq_len={self.seq_len} does not fit data.growth={self.growth}, the lengths"
                f" that rows have first, of which it must be a larger multiple; for rows of"
                f" {self.seq_len} tokens from the first step write data.growth=[]"
            )


# what shapes rows is the whole mixture's
_NOT_OF_A_PART = {"mixture", "seq_len", "growth", "rows", "shuffle_buffer"}


def mixture_parts(data: DataConfig) -> list[tuple[DataConfig, float | None]]:
    """Return the settings and the weight of each part of a mixture; no weights: all of every part.

    ``eval_fraction``, ``max_bad_fraction`` and ``max_row_bytes`` are the mixture's where a part
    does not say them.

    Raises:
        ConfigError: if a part has an unknown key or a wrong value; names the part.
    """
    known = {f.name: str(f.type) for f in fields(DataConfig) if f.name not in _NOT_OF_A_PART}
    found: list[tuple[DataConfig, float | None]] = []
    for number, entry in enumerate(data.mixture):
        place = f"data.mixture[{number}]"
        check(isinstance(entry, dict), place, entry, "{source: ..., path: ..., weight: ...}")
        inherited = ("eval_fraction", "max_bad_fraction", "max_row_bytes")
        values: dict[str, Any] = {key: getattr(data, key) for key in inherited}
        values |= {str(key): value for key, value in entry.items()}
        weight = values.pop("weight", None)
        ok = isinstance(weight, int | float) and not isinstance(weight, bool) and weight > 0
        check(ok or weight is None, f"{place}.weight", weight, "a positive number")
        errors.one_of(f"{place}.source", values.get("source"), *SOURCES[:-1])
        for key, value in values.items():
            if key not in known:
                hint = errors.did_you_mean(key, [*known, "weight"])
                raise ConfigError(f"unknown key {place}.{key}{hint}")
            _check_type(f"{place}.{key}", value, known[key])
        try:
            part = DataConfig(**values)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
        found.append((part, None if weight is None else float(weight)))
    weights = [weight for _, weight in found]
    some = None in weights and any(weights)
    all_or_none = "a list in which every part has a weight, or none has"
    check(not some, "data.mixture", weights, all_or_none)
    return found


# OmegaConf checks the types of the settings themselves, but not of what stands in a list
_TYPES = {"str": str, "float": int | float, "bool": bool, "int": int, "list": list, "dict": dict}


def _check_type(key: str, value: object, declared: str) -> None:
    if value is None and declared.endswith("| None"):
        return
    name = declared.partition("[")[0].partition(" ")[0]
    is_flag = isinstance(value, bool) and name != "bool"  # to Python, True is a number
    check(isinstance(value, _TYPES[name]) and not is_flag, key, value, f"of type {name}")


@dataclass
class FeaturesConfig(Section):
    """Hidden states of the frozen base, so that heads train without running it."""

    # where it lies or is to be made; empty: run the base at every step; auto: beside the run's
    # directory, by the digest of base and data, where the disk has room
    dir: str = ""
    # auto: that of model.dtype; int8: with a scale per token
    dtype: str = one_of("auto", "float32", "bfloat16", "int8")
    # a vLLM server that gives them in the base's place, as http://localhost:8000/v1: while heads
    # train, or, with dir, once; scripts/engine_features.py starts one
    endpoint: str = ""

    def __post_init__(self) -> None:
        self.dtype = DTYPES.get(self.dtype, self.dtype)
        super().__post_init__()
        if self.endpoint and self.dir == "auto":
            self.dir = ""
        url = not self.endpoint or self.endpoint.startswith(("http://", "https://"))
        self.check(url, "endpoint", "like http://localhost:8000/v1")

    @property
    def source(self) -> str:
        """The setting that names where they come from; empty where the base is run."""
        given = {"dir": self.dir, "endpoint": self.endpoint}
        return next((f"features.{key}={value}" for key, value in given.items() if value), "")
