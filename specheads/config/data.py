"""The settings of data: what is trained on, how it is shown, and how a base model makes it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

from specheads.system.errors import (
    DTYPES,
    MISSING,
    ConfigError,
    check,
    check_device,
    dtype_name,
    one_of,
)

SOURCES = ("pycode", "jsonl", "parquet", "hub", "mixture")


@dataclass
class DataConfig:
    """Which records, and how they become fixed-length rows."""

    # pycode (the Python source on this machine), jsonl, parquet, hub (a datasets name), mixture
    source: str = "pycode"
    path: str | None = None  # jsonl, parquet: the training file; hub: the data set's name
    eval_path: str | None = None  # jsonl, parquet: held-out file; None holds out eval_fraction
    eval_fraction: float = 0.05
    subset: str | None = None  # hub: which configuration of the data set
    split: str = "train"  # hub: the split to train on
    eval_split: str | None = None  # hub: the split to hold out; None holds out eval_fraction
    revision: str | None = None  # hub: branch, tag or commit
    # jsonl, parquet, hub: read while training, without holding (or downloading) all records
    streaming: bool = False
    shuffle_buffer: int = 10_000  # streaming: rows that are shuffled together, and held in memory
    max_row_bytes: int = 16 << 20  # a larger row is a bad one, and is never parsed
    # names of the file's columns where they are not ours, e.g. {prompt: instruction}
    columns: dict[str, str] = field(default_factory=dict)
    # mixture: [{source: jsonl, path: a.jsonl, weight: 0.7}, ...]; weight is the share of records
    mixture: list[Any] = field(default_factory=list)
    max_bad_fraction: float = 0.05  # of records that cannot be read, before the run is refused
    kinds: list[str] = field(default_factory=list)  # pycode: kinds of pairs; empty means all
    documents: float = 0.0  # pycode: share of tokens that come from whole documents
    packages: list[str] = field(default_factory=list)  # pycode: empty means the default list
    max_records: int = 0  # 0: all
    seq_len: int = 512  # tokens per packed row
    # pretrain: shorter rows first, e.g. [[512, 0.7], [1024, 0.9]]: 512 for 70% of the steps
    growth: list[Any] = field(default_factory=list)
    rows: int = 16  # rows per micro-batch and rank

    def __post_init__(self) -> None:
        one_of("data.source", self.source, *SOURCES)
        check(
            0 <= self.max_bad_fraction <= 1,
            "data.max_bad_fraction",
            self.max_bad_fraction,
            "in [0, 1]",
        )
        check(0 < self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "in (0, 1)")
        check(0 <= self.documents <= 1, "data.documents", self.documents, "in [0, 1]")
        for key in ("shuffle_buffer", "max_row_bytes"):
            check(getattr(self, key) >= 1, f"data.{key}", getattr(self, key), "at least 1")
        check(
            not self.streaming or self.source in ("jsonl", "parquet", "hub"),
            "data.streaming",
            self.streaming,
            f"false with data.source={self.source}, which is held in memory",
        )
        check(self.seq_len >= 2, "data.seq_len", self.seq_len, "at least 2")
        check(self.rows >= 1, "data.rows", self.rows, "at least 1")
        stages = [*self.growth, [self.seq_len, 1.0]]
        check(
            all(len(stage) == 2 for stage in stages)
            and all(0 < a[0] < b[0] for a, b in pairwise(stages[:-1]))
            and all(0 < a[1] < b[1] for a, b in pairwise(stages)),
            "data.growth",
            self.growth,
            "[divisor of data.seq_len, share of the steps until then], both rising",
        )
        if any(not 0 < length < self.seq_len or self.seq_len % length for length, _ in self.growth):
            raise ConfigError(
                f"data.seq_len={self.seq_len} does not fit data.growth={self.growth}, the lengths"
                f" that rows have first, of which it must be a larger multiple; for rows of"
                f" {self.seq_len} tokens from the first step write data.growth=[]"
            )
        for source, what in (
            ("jsonl", "a .jsonl file"),
            ("parquet", "a .parquet file or a folder of them"),
            ("hub", "the name of a data set"),
        ):
            check(self.source != source or bool(self.path), "data.path", self.path, what)
        check(
            self.source != "mixture" or len(self.mixture) > 0,
            "data.mixture",
            self.mixture,
            "[{source: ..., path: ..., weight: ...}, ...]",
        )
        check(
            self.source != "hub" or not self.eval_path,
            "data.eval_path",
            self.eval_path,
            "left out with data.source=hub, which has data.eval_split",
        )
        check(
            self.source == "hub" or not self.eval_split,
            "data.eval_split",
            self.eval_split,
            "left out unless data.source=hub; there is data.eval_path",
        )
        if self.source == "mixture":
            mixture_parts(self)


# what shapes rows is the whole mixture's
_NOT_OF_A_PART = {"mixture", "seq_len", "growth", "rows", "shuffle_buffer"}


def mixture_parts(data: DataConfig) -> list[tuple[DataConfig, float | None]]:
    """Return the settings and the weight of each part of a mixture; no weights: all of every part.

    ``eval_fraction``, ``max_bad_fraction`` and ``max_row_bytes`` are the mixture's where a part
    does not say them.

    Raises:
        ConfigError: if a part has an unknown key or a wrong value; names the part.
    """
    known = {f.name: f for f in fields(DataConfig) if f.name not in _NOT_OF_A_PART}
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
        check("source" in values, f"{place}.source", None, "one of " + ", ".join(SOURCES[:-1]))
        for key, value in values.items():
            if key not in known:
                close = difflib.get_close_matches(key, [*known, "weight"], n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise ConfigError(f"unknown key {place}.{key}{hint}")
            _check_type(f"{place}.{key}", value, str(known[key].type))
        one_of(f"{place}.source", values["source"], *SOURCES[:-1])
        try:
            part = DataConfig(**values)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
        found.append((part, None if weight is None else float(weight)))
    weights = [weight for _, weight in found]
    check(
        None not in weights or not any(weights),
        "data.mixture",
        weights,
        "a list in which every part has a weight, or none has",
    )
    return found


def _check_type(key: str, value: object, declared: str) -> None:
    # OmegaConf checks the settings themselves, but not what stands in a list
    if value is None and declared.endswith("| None"):
        return
    name = declared.partition("[")[0].partition(" ")[0]
    kinds: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "float": (int, float),
        "bool": (bool,),
        "int": (int,),
        "list": (list,),
        "dict": (dict,),
    }
    is_flag = isinstance(value, bool) and name != "bool"  # to Python, True is a number
    check(isinstance(value, kinds[name]) and not is_flag, key, value, f"of type {name}")


@dataclass
class FeaturesConfig:
    """A cache of the frozen base's last hidden states, so that heads train without the base."""

    dir: str = ""  # where it lies or is to be made; empty: run the base at every step
    dtype: str = "auto"  # auto (that of model.dtype), float32, bfloat16, int8 (a scale per token)

    def __post_init__(self) -> None:
        self.dtype = DTYPES.get(self.dtype, self.dtype)
        one_of("features.dtype", self.dtype, "auto", "float32", "bfloat16", "int8")


@dataclass
class PreviewConfig:
    """Everything ``python -m specheads.preview`` accepts."""

    model: str = "tinycode"  # whose tokenizer and chat template
    revision: str | None = None
    num_records: int = 5  # shown, of each kind at least one
    color: str = "auto"  # auto, always, never
    json: bool = False  # one JSON object on standard output, everything else on standard error
    seed: int = 0
    trust_remote_code: bool = False
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        check(self.num_records >= 0, "num_records", self.num_records, "at least 0")
        one_of("color", self.color, "auto", "always", "never")


@dataclass
class RegenerateConfig:
    """Everything ``python -m specheads.regenerate`` accepts."""

    # the base model that answers; empty: the checkpoint's, or tinycode. With an endpoint: whose
    # tokenizer the stored token ids are of; empty stores none
    model: str = ""
    revision: str | None = None
    checkpoint: str = ""  # an export on that base: its heads make the answers come faster
    endpoint: str = ""  # an OpenAI-compatible server instead, e.g. http://localhost:8000/v1
    endpoint_model: str = ""  # the model's name there; empty: the first that the server lists
    concurrency: int = 32  # endpoint: requests at one time
    retries: int = 4  # endpoint: of a failed request, with growing pauses
    timeout: float = 300.0  # endpoint: seconds of one request
    prompts: str = ""  # a .jsonl of records; empty: the records that data says
    data: DataConfig = field(default_factory=DataConfig)
    output: str = MISSING  # the .jsonl to write; one that is there is continued
    limit: int = 0  # records of the input; 0: all
    batch_size: int = 8
    max_new_tokens: int = 512  # of one answer; longer ones are quarantined as truncated
    keep_truncated: bool = False  # keep answers that reached the limit, without their end
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"  # auto: a GPU if there is one; cpu, cuda, cuda:1, mps
    threads: int = 0  # 0: OMP_NUM_THREADS, the container's quota, the processors: the least
    json: bool = False  # one JSON object on standard output, everything else on standard error
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check(self.concurrency >= 1, "concurrency", self.concurrency, "at least 1")
        check(self.retries >= 0, "retries", self.retries, "at least 0")
        check(self.timeout > 0, "timeout", self.timeout, "positive")
        check(self.limit >= 0, "limit", self.limit, "at least 0")
        check(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")
        check(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        check(self.temperature >= 0, "temperature", self.temperature, "at least 0")
        check(self.top_k >= 0, "top_k", self.top_k, "at least 0")
        check(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        check(
            not (self.endpoint and self.checkpoint),
            "endpoint",
            self.endpoint,
            "left out with checkpoint",
        )
        self.dtype = dtype_name("dtype", self.dtype, "auto")
        check_device(self.device)
