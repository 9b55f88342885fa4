"""From a base model's name to heads for it: the stages of ``specheads auto``, in their order.

Each stage writes what the next one reads below the run's folder, and ``auto.json`` says which have
ended: the same command goes on behind the last of them. How the time is divided is decided once,
from what the first questions and answers took here, and kept in the same file, so that a run that
was killed comes to the same data as one that was not.
"""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from specheads.config import AutoConfig, DecodeConfig, RegenerateConfig, TrainConfig
from specheads.config.compose import composed, load_recipe
from specheads.config.main import tidy_arguments
from specheads.data.load import read_jsonl
from specheads.data.pack import check_isolation
from specheads.data.schema import differences
from specheads.decoding.exported import load_subject
from specheads.formats import card
from specheads.measure import bench, clock, diagnose, evaluate, render
from specheads.models.base import Loading, context_length, load_base_model, load_tokenizer
from specheads.models.output import layers_of
from specheads.models.support import tree_support
from specheads.pipeline import Speculation, run_recipe
from specheads.regeneration.answering import regenerate
from specheads.regeneration.engine import load_engine, weights_of, who_answers
from specheads.regeneration.questions import Questioner
from specheads.runs.directory import is_used, lock, unlock
from specheads.system import hardware
from specheads.system.errors import ConfigError, RunError
from specheads.system.files import write_whole
from specheads.training import rule, setup

Say = Callable[[str], None]

FIRST = 64  # questions that are written and answered to learn how long that takes here
LEAST = 128  # questions below which heads learn little but their answers by heart
TEXT = 0.4  # share of the time, but for the measuring, that questions and answers take
PASSES = 3  # times the rule's steps that heads may learn for: those that ship gained until there
MEASURING = 0.12  # share of the time that the tree and the figures take
TEMPERATURE = 0.7  # of the answers: more varied than greedy ones, closer to what is asked for
ANSWER_TOKENS = 128  # of one answer at most; those that reach it are learned without their end
NUM_PROMPTS, NEW_TOKENS = 12, 48  # that the tree is chosen on; the figures are of others
TEMPERATURES = (0.0, 0.7, 1.0)
# settings that answers and questions have from auto's own
SHARED = ("model", "batch_size", "dtype", "device", "threads", "seed", "trust_remote_code")


def best_recipe(base: PreTrainedModel) -> str:
    """Return the recipe of the heads that serve a base best, by what it can be asked for.

    Block heads read states between its layers, and their trees need a base that takes trees.
    """
    try:
        layers_of(base)
    except ValueError:
        return "hydra"
    return "block" if tree_support(base).kind == "tree" else "hydra"


def auto(config: AutoConfig, say: Say) -> dict[str, Any]:
    """Train heads for a base model from nothing but its name, or go on with that.

    Args:
        config: the settings.
        say: called with what a user wants to know on the way.

    Returns:
        ``export`` (the folder of the heads), ``bench`` (the content of bench.json), ``plan`` and
        ``seconds`` by stage.

    Raises:
        ConfigError: if settings or data are wrong, the folder holds another run, or the base can
            not be decoded with guesses.
        RunError: if the time is too short for this base here, or its questions are of no use and
            there are no others.
    """
    name = config.name or "auto-" + (re.sub(r"[^\w.-]+", "-", config.model).strip("-.") or "model")
    folder = Path("runs") / name
    folder.mkdir(parents=True, exist_ok=True)
    held = lock(folder / "LOCK")
    try:
        stages = _Stages(config, folder, say)
        stages.stage("doctor", stages.examine)
        stages.stage("first questions", stages.write_first)
        stages.stage("questions and answers", stages.write)
        stages.stage("features", stages.store_features)
        stages.stage("training", stages.train)
        stages.stage("figures", stages.measure)
        return stages.conclude()
    finally:
        unlock(folder, held)


class _Stages:
    """What each stage does; what has ended, and what was decided, stands in ``auto.json``.

    Args:
        config: the settings.
        folder: of the run.
        say: called with what a user wants to know.

    Raises:
        ConfigError: if the folder holds a run with other settings.
    """

    def __init__(self, config: AutoConfig, folder: Path, say: Say) -> None:
        self.config, self.folder, self.say = config, folder, say
        asked = asdict(config)
        for key in ("minutes", "json", "device", "threads", "name"):  # these change no data
            del asked[key]
        self.path = folder / "auto.json"
        self.found: dict[str, Any] = {"asked": asked, "seconds": {}, "plan": {}}
        if self.path.exists():
            try:
                self.found = json.loads(self.path.read_text(encoding="utf-8"))
                before, *_ = (dict(self.found[key]) for key in ("asked", "seconds", "plan"))
            except (ValueError, KeyError, TypeError) as error:
                damaged = f"{self.path} is damaged ({error}); choose another name="
                raise ConfigError(damaged) from None
            if others := differences(before, asked):
                raise ConfigError(
                    f"{self.path} was begun with other settings: {others}; choose another name=,"
                    " or give what it was begun with"
                )
        self.ended: dict[str, float] = self.found["seconds"]
        self.plan: dict[str, Any] = self.found["plan"]
        self._said = time.monotonic()
        # the user's server, if there is one, answers in the base's place
        endpoint, model = config.endpoint, config.endpoint_model
        self.server: dict[str, Any] = {"endpoint": endpoint, "endpoint_model": model}
        device, self.dtype, _ = hardware.prepare(config.device, config.dtype, config.threads)
        self.loading: Loading = {"device": device, "dtype": self.dtype, "attn": "auto"}
        self.loading["trust_remote_code"] = config.trust_remote_code

    @property
    def left(self) -> float:
        """Minutes that are left of those asked for, by the stages that have ended."""
        return self.config.minutes - sum(self.ended.values()) / 60

    def stage(self, name: str, what: Callable[[], Any]) -> None:
        """Do what the stage ``name`` does, unless it has been done."""
        if name in self.ended:
            self.say(f"{name}: done before")
            return
        self.say(f"{name}: {max(self.left, 0):.0f} minutes left")
        begun = time.monotonic()
        what()
        gc.collect()  # the models of a stage, which hold each other
        self.ended[name] = round(time.monotonic() - begun, 1)
        write_whole(self.path, json.dumps(self.found, indent=1) + "\n")

    def doing(self, what: str, share: float = 0.0) -> None:
        """Say what takes a while now, and every ten seconds how much of it is done."""
        if not share or time.monotonic() - self._said > 10:
            self.say(f"{what}, {share:.0%}" if share else what)
            self._said = time.monotonic()

    def examine(self) -> None:
        """Find out what the base can be decoded with, and which recipe serves it."""
        name = self.config.model
        tokenizer = load_tokenizer(name, trust_remote_code=self.config.trust_remote_code)
        base = load_base_model(name, **self.loading)
        for finding in diagnose.examine(base, tokenizer):
            self.say(f"{finding.name}: {finding.text}")
            if not finding.ok:
                raise RunError(f"{name} cannot be decoded with guesses: {finding.text}")
        check_isolation(base)  # training's own check, before there is anything to train on
        kind = self.config.kind
        self.plan["recipe"] = best_recipe(base) if kind == "auto" else kind
        self.plan["context"] = context_length(base)
        self.plan["attn"] = base.config._attn_implementation

    def write_first(self) -> None:
        """Write the user's own answers, and of the base's questions as many as tell the time."""
        config, begun = self.config, time.monotonic()
        files = self._write_given()
        start, before = time.monotonic(), self.folder / "answers.jsonl.questions.jsonl"
        # what a run that was killed here has left says nothing about time
        known = before.read_bytes().count(b"\n") if before.exists() else 0
        try:
            self._write_own(known + FIRST)
        except RunError as error:
            if not files:
                raise
            self.say(f"going on with the given prompts alone: {error}")
            self.plan |= {"files": files, "questions": 0}
            return
        self.plan["files"] = [*files, "answers.jsonl"]
        number, seconds = FIRST, time.monotonic() - start
        left = self.left - (start - begun) / 60
        text = 60 * TEXT * (left - MEASURING * config.minutes)
        # few questions fill no batch and end with its longest: as many again, by half the time
        if (more := int((text - seconds) * FIRST / seconds / 2)) >= FIRST:
            start = time.monotonic()
            self._write_own(known + FIRST + more)
            number, text, seconds = more, text - seconds, time.monotonic() - start
            known += FIRST
        text = max(0.0, text - seconds)
        self.plan["questions"] = known + number + int(text * number / seconds)
        if not files and self.plan["questions"] < LEAST:
            needed = LEAST * seconds / number / 60 / TEXT
            least = (needed + config.minutes - left) / (1 - MEASURING)
            raise RunError(
                f"minutes={config.minutes:g} is too short for {config.model} here:"
                f" {number} questions and answers took {seconds:.0f} seconds; expected at least"
                f" minutes={least:.0f}"
            )
        self.say(f"{self.plan['questions']:,} questions and answers, {text / 60:.0f} minutes")

    def write(self) -> None:
        """Write the rest of the base's questions, and answer them."""
        if self.plan["questions"]:
            self._write_own(self.plan["questions"])

    def _answering(self, **changes: Any) -> RegenerateConfig:
        shared: dict[str, Any] = {key: getattr(self.config, key) for key in SHARED}
        shared |= {"max_new_tokens": ANSWER_TOKENS, "temperature": TEMPERATURE}
        return RegenerateConfig(**shared, keep_truncated=True, **changes)

    def _write_given(self) -> list[str]:
        """Answer what the user gave; return the names of the files."""
        config, files = self.config, list[str]()
        for key, name in (("prompts", "own.jsonl"), ("data", "data.jsonl")):
            if given := getattr(config, key):
                files.append(name)
                chosen = {key: given, "output": str(self.folder / name), **self.server}
                regenerate(self._answering(**chosen), self.say)
        return files

    def _write_own(self, limit: int) -> None:
        """Let the base write ``limit`` questions, and answer them: it, or the server."""
        config, output = self.config, str(self.folder / "answers.jsonl")
        own = self._answering(prompts="self", limit=limit, output=output)
        if not config.endpoint:
            regenerate(own, self.say)
            return
        questions, whose = Path(f"{output}.questions.jsonl"), who_answers(own)
        writer = Questioner(
            load_engine(own, whose), own.questions, config.seed, weights_of(own, whose)
        )
        self.say(writer.write(questions, limit)[1])
        regenerate(replace(own, prompts=str(questions), **self.server), self.say)

    def _training(self, *more: str) -> TrainConfig:
        """Return the settings of the training, by rule but for those of ``more``, key=value."""
        config, dtype = self.config, str(self.dtype).removeprefix("torch.")
        parts = [{"source": "jsonl", "path": str(self.folder / n)} for n in self.plan["files"]]
        words = [f"+recipe={self.plan['recipe']}", f"model={config.model}", "data=mixture"]
        words += [f"run_dir={self.folder / 'training'}", "data.mixture=[{source: jsonl, path: x}]"]
        words += [f"seed={config.seed}", f"device={config.device}", f"model.dtype={dtype}"]
        words += [f"model.trust_remote_code={config.trust_remote_code}"]
        words += [f"model.attn={self.plan['attn']}", f"evaluate.num_prompts={NUM_PROMPTS}"]
        words += [f"evaluate.max_new_tokens={NEW_TOKENS}"]
        words += [f"evaluate.minutes={MEASURING * config.minutes / 2}", *more]
        cfg = composed("train", TrainConfig, tidy_arguments(words))
        length = min(cfg.data.seq_len, self.plan["context"] or cfg.data.seq_len)
        return replace(cfg, data=replace(cfg.data, mixture=parts, seq_len=length))

    def store_features(self) -> None:
        """Store the base's hidden states, and count the steps that the time holds."""
        cfg, begun = self._training(), time.monotonic()
        read = setup.read_data(cfg)
        base, output, tokenizer = setup.load_base(cfg)
        data = setup.load_data(cfg, base, tokenizer, train_base=False, read=read)
        evaluate.write_prompts(self.folder / "heldout.jsonl", data.heldout_records)
        cfg = rule.decide(cfg, base, data.train)
        heads = setup.build_heads(cfg, base, output, data)
        one = Speculation(cfg, base, heads, output, tokenizer, data)
        pace = one.pace(self)
        left = self.left - (time.monotonic() - begun) / 60
        minutes = left - MEASURING * self.config.minutes
        fitting = rule.steps_for_time(minutes, pace)
        self.plan["steps"] = min(PASSES * cfg.steps, fitting)
        self.say(f"{self.plan['steps']:,} steps of {pace:.2f} seconds")

    def train(self) -> None:
        """Train heads, choose their tree, and export them."""
        steps = self.plan["steps"]
        # once, in the middle, and not in a short run: it takes as long as many steps
        middle = steps // 2 + 1 if self.config.minutes > 30 else 0
        resume = "auto" if is_used(self.folder / "training") else ""
        often = f"checkpoint.every={max(1, steps // 10)}", f"evaluate.every={middle}"
        cfg = self._training(f"steps={steps}", *often, f"resume={resume}")
        run_recipe(load_recipe(cfg.recipe), cfg, self.say)

    def measure(self) -> None:
        """Decode held-out questions beside plain decoding in what is left of the time for it."""
        run = self.folder / "training"
        subject = load_subject(str(run / "export"), **self.loading)
        assert subject.export is not None
        contest = bench.Contest.of(subject, NEW_TOKENS)
        quoted = bench.quoted_method(subject.export, DecodeConfig(), [])
        if quoted == "tree_dynamic":
            heads = contest.of_export(subject.export, DecodeConfig())
        else:
            heads = contest.of_trees(subject.export.heads, [subject.export.tree])
        methods = [*contest.baselines(), *heads]
        seen = {each["id"] for each in read_jsonl(run / "prompts.jsonl")}
        heldout = read_jsonl(self.folder / "heldout.jsonl")
        others = [record for record in heldout if record["id"] not in seen]
        path = self.folder / "measured.jsonl"  # the tree was not chosen on these, if there are any
        evaluate.write_prompts(path, others or heldout)
        base, tokenizer = subject.base, subject.tokenizer
        first, _ = clock.prompts_of(base, tokenizer, path, 1, NEW_TOKENS)
        begun = time.monotonic()
        for _ in clock.take_turn(methods, clock.make_batches(first, 1)[0], 0.0, prefill=True):
            pass  # met for the first time, which takes longer: never too little time
        seconds = (time.monotonic() - begun) * len(TEMPERATURES)
        # what a killed stage took is not known: never longer than its share
        minutes = min(max(self.left, 1), MEASURING * self.config.minutes)
        number = max(4, int(60 * minutes / seconds))
        prompts, digest = clock.prompts_of(base, tokenizer, path, number, NEW_TOKENS)
        settings = {
            "checkpoint": str(run / "export"),
            "tree": subject.export.tree.to_json(),
            "num_prompts": len(prompts),
            "prompts_sha256": digest,
            "max_new_tokens": NEW_TOKENS,
        }
        plan = bench.Plan(TEMPERATURES, repeats=1)
        result, _ = bench.benchmark(
            base, methods, prompts, plan, settings=settings, headline=quoted
        )
        write_whole(self.folder / "bench.json", json.dumps(result, indent=1) + "\n")
        print(render.bench_text(result))
        card.measured(run / "export", result)

    def conclude(self) -> dict[str, Any]:
        """Say what came of it in three lines."""
        export = self.folder / "training" / "export"
        result = json.loads((self.folder / "bench.json").read_text(encoding="utf-8"))
        quoted = result["headline"]["method"]
        rows = {r["temperature"]: r for r in result["rows"] if r["method"] == quoted}
        told = ", ".join(
            f"{row['speedup_vs_plain']:.2f}x ({render.interval(row['speedup_vs_plain_ci95'])}) at"
            f" T={temperature:g}"
            for temperature, row in rows.items()
        )
        pays = [f"{t:g}" for t, row in rows.items() if row["speedup_vs_plain_ci95"][0] > 1]
        verdict = f"pays at T={', '.join(pays)}" if pays else "does not pay on this machine"
        self.say(
            f"speed-up {told} over plain decoding of {result['settings']['num_prompts']} held-out"
            f" questions: speculation {verdict}"
        )
        self.say(f"heads: {export}, with a card; figures: {self.folder / 'bench.json'}")
        self.say(
            f"use: specheads chat checkpoint={export}; in Python"
            f" specheads.load('{export}'); for engines specheads export checkpoint={export}"
            " format=..., see docs/serving.md"
        )
        return {
            "export": str(export),
            "bench": result,
            "plan": self.plan,
            "seconds": self.ended,
        }
