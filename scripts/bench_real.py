r"""Measure a real base with heads on the questions of data/real: ``make bench-real``.

    python scripts/bench_real.py [--resume]
    python scripts/bench_real.py --checkpoint runs/mine/export --out build/real
    python scripts/bench_real.py --checkpoint runs/mine/export --out build/real \
        --quick data/real/questions.jsonl

Writes into ``benchmarks/real``: ``bench`` (every question), ``transformers`` (its own loops beside
ours, three questions of a kind), ``own`` (questions that the base wrote itself, where the export
holds such) and ``float32``, all laid out as bench.json is; ``identity``, what rounding does to
greedy texts; and ``spec_bench``, by that suite's formula. ``scripts/render.py`` makes tables of it.

Every answer is kept as soon as it is there, and ``--resume`` goes on. What fits into ``--minutes``
is decided by the number of questions in float32. A line at least every ten seconds says where it
stands. The machine should do nothing else meanwhile.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Self

import harness
import torch

from specheads.config import DecodeConfig
from specheads.decoding.exported import Subject, load_subject, weights_digest
from specheads.decoding.result import DecodedRow
from specheads.measure import rows as report
from specheads.measure.bench import Contest, asked_for, make_rows, quoted_method
from specheads.measure.clock import Batch, Method, Prompt, Runs, make_batches, prompts_of, take_turn
from specheads.measure.identity import given_logits
from specheads.measure.render import bench_text, disturbance_lines
from specheads.models.support import tree_support
from specheads.system import hardware

QUESTIONS = harness.ROOT / "data" / "real" / "questions.jsonl"
GIVEN = ("summary", "question", "rewriting")  # kinds of questions that hold a text to copy from
FEW = 24  # three questions of each kind
LINE_EVERY = 10.0  # seconds
JUDGED = 8  # texts of each temperature along which rounding is measured
# what a question costs in plain texts, where it was not measured yet: guesses on the safe side
JUDGING, FLOAT32, ROUNDING, ALIKE, SPEC_BENCH, OWN = 1.0, 3.2, 0.9, 2.4, 1.9, 3.6


@dataclass
class Settings:
    """What is measured.

    Attributes:
        checkpoint: an export, or a base model alone
        base: where the export's base model is, if it was moved
        out: folder of the results
        work: folder of the answers so far
        minutes: for everything
        num_questions: of the 96; fewer to try it
        max_new_tokens: of an answer
        dtype: of the weights
        device: auto, cpu, cuda
        compile: compile the base's passes, plain decoding's too
        tree: of the heads: auto takes the export's own choice, made by the clock of a CPU
        threads: 0 takes as many as may be used
        resume: keep the answers that are there
        quick: plain decoding and the heads alone, at T=0 and 1, on the questions of this file only
    """

    checkpoint: str = "data/checkpoints/smollm2"
    base: str = ""
    out: Path = Path("benchmarks/real")
    work: Path = Path("runs/real/bench")
    minutes: float = 90.0
    num_questions: int = 96
    max_new_tokens: int = 64
    dtype: str = "bfloat16"
    device: str = "cpu"
    compile: bool = False
    tree: Literal["auto", "static", "dynamic"] = "auto"
    threads: int = 0
    resume: bool = False
    quick: Path | None = None


class Status:
    """Keeps what was measured, and says every few seconds, while open, where the measuring stands.

    Args:
        minutes: that all of it may take, what was kept before included.
    """

    def __init__(self, minutes: float) -> None:
        self.budget, self.spent_before, self.ahead = minutes * 60, 0.0, 0.0
        self.doing, self.begin = "loading", time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._talk, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _talk(self) -> None:
        while not self._over.wait(LINE_EVERY):
            self.say(self.doing)

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget - self.spent_before - (time.monotonic() - self.begin)

    def say(self, doing: str) -> None:
        """Print what is being done, and the time it took and will take."""
        self.doing = doing
        ahead = f", about {self.ahead / 60:.0f} more" if self.ahead > 0 else ""
        spent = (self.budget - self.left) / 60
        print(f"{doing}; {spent:.1f} of {self.budget / 60:g} min{ahead}", flush=True)

    def kept(self, path: Path, make: Callable[[], Any]) -> Any:
        """Return what lies at ``path``, or make it and keep it there; its seconds count once."""

        def timed() -> dict[str, Any]:
            begin = time.monotonic()
            found = make()
            return {"found": found, "seconds": round(time.monotonic() - begin, 3)}

        known = path.is_file()
        record = harness.kept(path, timed)
        self.spent_before += record["seconds"] * known
        self.ahead -= record["seconds"]
        return record["found"]


@dataclass(frozen=True)
class Part:
    """Questions that some methods answer at one temperature, one question after the other.

    Attributes:
        name: and folder of what is kept.
        prompts: the questions.
        methods: those that answer all of them.
        temperature: of the sampling.
        beside: those that answer the first ``FEW`` only.
    """

    name: str
    prompts: Sequence[Prompt]
    methods: Sequence[Method]
    temperature: float
    beside: Sequence[Method] = ()

    def answers(self, folder: Path, status: Status) -> tuple[dict[str, Runs], dict[str, Any]]:
        """Answer what was not answered yet.

        Returns:
            The runs by method, and what was seen beside them, see :meth:`seen`.
        """
        runs = {each.name: Runs(seconds=[[]]) for each in (*self.methods, *self.beside)}
        turns, warm = [], False
        for number in range(len(self.prompts)):
            path = folder / self.name / f"{number:02d}.json"
            status.doing = f"{self.name}: question {number + 1} of {len(self.prompts)}"
            if not (warm or path.is_file()):
                warm = bool(list(self._turn(number)))  # the first of a process is slower
            turns.append(status.kept(path, partial(self._clocked, number)))
            for name, (seconds, row) in turns[-1]["texts"].items():
                runs[name].seconds[0].append(seconds)
                runs[name].decoded.append(DecodedRow(**row))
        status.say(f"{self.name}: all {len(self.prompts)} questions are answered")
        return runs, self._seen(runs["plain"], [turn["seen"] for turn in turns])

    def _turn(self, number: int) -> Iterator[tuple[str, tuple[float, float, list[DecodedRow]]]]:
        methods = [*self.methods, *(self.beside if number < FEW else ())]
        (batch,) = make_batches([self.prompts[number]], 1)
        return take_turn(methods, batch, self.temperature, seed=number, first=number)

    def _clocked(self, number: int) -> dict[str, Any]:
        begin = hardware.sample()
        turn = self._turn(number)
        texts = {name: (round(seconds, 6), asdict(row)) for name, (_, seconds, (row,)) in turn}
        return {"texts": texts, "seen": hardware.between(begin, hardware.sample())}

    def _seen(self, plain: Runs, seen: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what ``rows.seen_beside`` does; there is one repeat, so the drift is another.

        It is that of plain decoding's pace between the quarters of the questions, which hold the
        kinds in equal parts.
        """
        size = -(-len(seen) // 4)
        quarters = [range(len(seen))[i : i + size] for i in range(0, len(seen), size)]
        paces = [report.speed(report.whole(plain.only(quarter))) for quarter in quarters]
        known = [each for each in seen if each["other_share"] is not None]
        total = sum(each["seconds"] for each in known)
        others = sum(each["other_share"] * each["seconds"] for each in known)
        return {
            "temperature": self.temperature,
            "batch": 1,
            "drift": round(max(paces) / min(paces), 4),
            "seconds": round(total, 3),
            "other_share": round(others / total, 4) if total else None,
        }


@dataclass(frozen=True)
class Contestants:
    """A model that was loaded, its questions and the ways to answer them.

    Attributes:
        given: the settings.
        subject: the model.
        prompts: the questions.
        digest: sha256 of the questions' tokens.
        methods: by name.
        quoted: the name of the method to quote: the heads, where there are any.
    """

    given: Settings
    subject: Subject
    prompts: list[Prompt]
    digest: str
    methods: dict[str, Method]
    quoted: str

    @staticmethod
    def load(
        given: Settings, dtype: str, file: Path, number: int, *, invariant: bool = False
    ) -> "Contestants":
        """Load the model in ``dtype``, and ``number`` questions of ``file``."""
        device = hardware.pick_device(given.device)
        base = given.base or None
        subject = load_subject(given.checkpoint, base=base, dtype=dtype, device=device)
        limit, export = given.max_new_tokens, subject.export
        decode = DecodeConfig(tree=given.tree, compile=given.compile)
        prompts, digest = prompts_of(subject.base, subject.tokenizer, file, number, limit)
        contest = Contest.of(subject, limit, compile=given.compile, invariant=invariant)
        copying, both = replace(decode, drafter="suffix"), ["heads+suffix"] * bool(export)
        asked = asked_for(copying, both, has_heads=bool(export))
        quoted = quoted_method(export, decode, asked)
        heads = contest.of_trees(export.heads, [export.tree]) if export else []
        heads += contest.of_export(export, decode) if export else []
        found = [*contest.baselines(), *(each for each in heads if each.name == quoted)]
        found += contest.of_drafters(subject, asked, None)
        methods = {method.name: method for method in found}
        return Contestants(given, subject, prompts, digest, methods, quoted)

    @property
    def ours(self) -> list[Method]:
        """The methods of our own loop."""
        return [each for name, each in self.methods.items() if not name.startswith("hf_")]

    @property
    def quick(self) -> list[Method]:
        """Plain decoding, prompt lookup and the method to quote."""
        return self.only("plain", "prompt_lookup", self.quoted)

    @property
    def few(self) -> int:
        """Three questions of a kind, or as many as there are."""
        return min(FEW, len(self.prompts))

    def only(self, *names: str) -> list[Method]:
        """Return the methods of these names, each once."""
        return [self.methods[name] for name in dict.fromkeys(names)]

    def document(
        self, clocked: report.Clocked, watched: Sequence[dict[str, Any]], *, judge: bool = True
    ) -> dict[str, Any]:
        """Return the content of bench.json.

        Args:
            clocked: the runs; the questions are the first ones.
            watched: what was seen beside them.
            judge: find out where texts differ from plain decoding's, and whether rounding did it.
        """
        base, given, export = self.subject.base, self.given, self.subject.export
        names = {name for runs in clocked.values() for name in runs}
        methods = [each for each in self.methods.values() if each.name in names]
        if not judge:
            methods = [replace(each, seeded=False, lossless=False) for each in methods]
        number = min(len(of.decoded) for runs in clocked.values() for of in runs.values())
        prompts, heats = self.prompts[:number], sorted({heat for heat, _ in clocked})
        rows, noise = make_rows(base, methods, prompts, clocked, most_texts=JUDGED)
        settings = {
            "checkpoint": given.checkpoint,
            "tree": export.tree.to_json() if export else None,
            "num_prompts": number,
            "prompts_sha256": self.digest,
            "max_new_tokens": given.max_new_tokens,
            "base_parameters": sum(each.numel() for each in base.parameters()),
            "temperatures": heats,
            "batch_sizes": [1],
            "repeats": 1,
            "seed": 0,
            "threads": torch.get_num_threads(),
            "noise": asdict(noise) if noise else None,
        }
        result = {
            "environment": hardware.environment(base.device) | report.disturbance(watched),
            "settings": settings,
            # without T=0.7 the rule cannot be followed where greedy texts loop
            "headline": report.headline(rows, self.quoted) if 0.7 in heats else None,
            "crossover": report.crossovers(rows),
            "pairs": report.pairs(clocked),
            "rows": rows,
        }
        return result | {"warnings": disturbance_lines(result)}


def against_the_fastest(bench: dict[str, Any], few: Mapping[str, Any]) -> None:
    """Add to each row of ``bench`` its speed-up over the faster of plain decoding and generate.

    Generate answered only the questions of ``few``, beside plain decoding; that ratio is taken.
    """
    ratios = {
        row["temperature"]: row["speedup_vs_plain"]
        for row in few["rows"]
        if row["method"] == "hf_generate"
    }
    bench["settings"]["generate_over_plain"] = {f"{heat:g}": x for heat, x in ratios.items()}
    bench["settings"]["generate_questions"] = few["settings"]["num_prompts"]
    for row in bench["rows"]:
        ratio = ratios[row["temperature"]]
        faster = max(1.0, ratio)
        row["speedup_vs_hf_generate"] = round(row["speedup_vs_plain"] / ratio, 4)
        row["speedup_vs_fastest"] = round(row["speedup_vs_plain"] / faster, 4)
        bounds = row["speedup_vs_plain_ci95"]
        row["speedup_vs_fastest_ci95"] = [round(bound / faster, 4) for bound in bounds]
    quoted = (bench["headline"]["method"], bench["headline"]["temperature"])
    (row,) = (row for row in bench["rows"] if (row["method"], row["temperature"]) == quoted)
    keys = "speedup_vs_hf_generate", "speedup_vs_fastest", "speedup_vs_fastest_ci95"
    bench["headline"] |= {key: row[key] for key in keys}


def without_copying(one: Contestants, clocked: report.Clocked) -> list[dict[str, Any]]:
    """Return how fast the heads are beside what copies, on the kinds that give nothing to copy."""
    chosen = [n for n, prompt in enumerate(one.prompts) if prompt.kind not in GIVEN]
    return [
        {"temperature": heat} | report.versus(runs, one.quoted, other)
        for (heat, _), all_runs in clocked.items()
        for runs in [{name: of.only(chosen) for name, of in all_runs.items()}]
        for other in ("plain", "prompt_lookup", "suffix")
        if other in runs and other != one.quoted
    ]


@torch.inference_mode()
def plain_against_itself(
    one: Contestants, plain: Sequence[DecodedRow], folder: Path, status: Status
) -> list[dict[str, Any]]:
    """Return how many greedy texts stay the same where only the shape of the passes changes.

    In batches of two; and where a text is read again in passes of as many rows as the heads' tree
    has nodes, through transformers' own cache: up to the first token that is not the best any more
    this is what decoding in such passes would give.
    """
    base, rows = one.subject.base, one.methods[one.quoted].tree_nodes
    texts, in_twos, again = [each.new_tokens for each in plain], [], []

    def together(batch: Batch) -> list[list[int]]:
        return [each.new_tokens for each in one.methods["plain"].decode(batch, 0.0, 0)]

    for number, batch in enumerate(make_batches(one.prompts, 2)):
        status.doing = f"plain decoding against itself, batch {number + 1}"
        path = folder / "in_twos" / f"{number:02d}.json"
        in_twos += status.kept(path, partial(together, batch))
    for number, (prompt, text) in enumerate(zip(one.prompts, texts, strict=True), 1):
        status.doing = f"plain decoding against itself, text {number} in passes of {rows} rows"
        ids = torch.cat([prompt.input_ids, prompt.input_ids.new_tensor([text[:-1]])], dim=1)
        logits = given_logits(base, ids, prompt.input_ids.shape[1], rows)
        again.append(logits.argmax(-1).tolist())
    return [
        {
            "passes": passes,
            "identical": sum(a == b for a, b in zip(texts, others, strict=True)),
            "compared": len(texts),
        }
        for passes, others in (("in batches of 2", in_twos), (f"of {rows} rows", again))
    ]


def invariant(one: Contestants, folder: Path, status: Status) -> dict[str, Any]:
    """Return how many greedy texts are plain decoding's where both passes round alike, and a price.

    That is how fast both are then; a few questions are answered without it too, in the same turns.
    """
    given, names, without = one.given, ("plain", one.quoted), " without"
    alike = Contestants.load(given, given.dtype, QUESTIONS, len(one.prompts), invariant=True)
    beside = [replace(each, name=each.name + without) for each in one.only(*names)]
    part = Part("same rounding", alike.prompts, alike.only(*names), 0.0, beside)
    runs, _ = part.answers(folder, status)
    few = {name: of.only(range(one.few)) for name, of in runs.items()}
    plain, drafted = ([row.new_tokens for row in runs[name].decoded] for name in names)
    return {
        "identical": sum(a == b for a, b in zip(plain, drafted, strict=True)),
        "compared": len(plain),
        "speed": [report.versus(few, name, name + without) for name in names],
    }


def spec_bench(one: Contestants, folder: Path) -> None:
    """Let the command answer three questions of a kind, each plainly and with the heads.

    Raises:
        SystemExit: with its exit code, if it failed.
    """
    given = one.given
    chosen = {prompt.id for prompt in one.prompts[:FEW]}
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    asked = [line for line in lines if json.loads(line)["id"] in chosen]
    (folder / "few.jsonl").write_text("".join(f"{line}\n" for line in asked), encoding="utf-8")
    command = ["-m", "specheads.spec_bench", f"checkpoint={given.checkpoint}"]
    command += [f"base={given.base}"] * bool(given.base)
    command += [f"questions={folder / 'few.jsonl'}", f"answers={folder / 'answers'}"]
    command += [f"max_new_tokens={given.max_new_tokens}", f"dtype={given.dtype}", "warmup=1"]
    command += [f"out={given.out / 'spec_bench.json'}", f"threads={given.threads}"]
    if code := harness.run_command(command):
        raise SystemExit(code)


def work_folder(given: Settings) -> Path:
    """Return the folder of the answers so far, emptied unless they are to be kept.

    Raises:
        SystemExit: if they were made with other settings.
    """
    shared = ("checkpoint", "dtype", "max_new_tokens", "num_questions", "threads")
    shared += ("device", "compile", "tree")
    now = {name: getattr(given, name) for name in shared}
    now |= {"weights": weights_digest(given.checkpoint), "quick": str(given.quick or "")}
    if not given.resume:
        shutil.rmtree(given.work, ignore_errors=True)
    if (before := harness.kept(given.work / "settings.json", lambda: now)) != now:
        raise SystemExit(f"{given.work} holds answers of {before}: start without --resume")
    return given.work


def measured_pace(one: Contestants, folder: Path, status: Status) -> float:
    """Return the seconds of a plain text; a turn of all methods would cost minutes."""
    part = Part("pace", one.prompts[:FEW:7], one.only("plain"), 0.0)
    return fmean(report.whole(part.answers(folder, status)[0]["plain"])[1])


def affordable(seconds: float, each: float, few: int, number: int) -> int:
    """Return how many of ``number`` questions fit into a time, the kinds in equal parts.

    Args:
        seconds: that are left.
        each: seconds of a question.
        few: questions that are taken in any case.
        number: of questions.
    """
    return min(number, max(8 * int(seconds / (8 * each)), few))


def the_questions(one: Contestants, folder: Path, status: Status, pace: float) -> dict[str, Any]:
    """Return the figures of all questions, and of three of a kind beside transformers' loops."""
    number, theirs = len(one.prompts), one.only("hf_generate", "hf_lookup")
    parts = [
        Part("T=0", one.prompts, one.ours, 0.0, theirs),
        Part("T=1", one.prompts, one.ours, 1.0, theirs),
        Part("T=0.7", one.prompts, one.quick, 0.7, theirs[:1]),
    ]
    turns = sum(len(part.methods) * number + len(part.beside) * one.few for part in parts)
    status.ahead += pace * (turns + JUDGING * number)
    status.say(f"{number} questions, a plain text takes {pace:.2f} s")
    watched, few, whole = [], {}, {}
    for part in parts:
        runs, seen = part.answers(folder, status)
        watched.append(seen)
        key = part.temperature, 1
        few[key] = {name: of.only(range(one.few)) for name, of in runs.items()}
        whole[key] = {each.name: runs[each.name] for each in part.methods}
    beside = one.document(few, watched, judge=False)
    status.doing = "judging where texts differ"
    bench = status.kept(folder / "bench.json", lambda: one.document(whole, watched))
    against_the_fastest(bench, beside)
    bench["without_copying"] = without_copying(one, whole)
    itself = plain_against_itself(one, whole[0.0, 1]["plain"].decoded, folder, status)
    error = {one.given.dtype: tree_support(one.subject.base).error}
    found = {"self_test_error": error, "plain_against_itself": itself}
    return {"bench": bench, "transformers": beside, "identity": found}


def both_temperatures(
    one: Contestants, methods: Sequence[Method], what: str, folder: Path, status: Status
) -> dict[str, Any]:
    """Return the figures of some methods at T=0 and 1, on all questions of a model."""
    clocked, watched = {}, []
    for heat in (0.0, 1.0):
        part = Part(f"{what}, T={heat:g}", one.prompts, methods, heat)
        clocked[heat, 1], seen = part.answers(folder, status)
        watched.append(seen)
    return one.document(clocked, watched)


def measure_quickly(given: Settings, file: Path, status: Status) -> None:
    """Measure the heads alone beside plain decoding on the questions of one file, and write."""
    folder = work_folder(replace(given, work=given.work.with_name(f"quick-{file.stem}")))
    one = Contestants.load(given, given.dtype, file, given.num_questions)
    status.ahead = 4 * measured_pace(one, folder, status) * len(one.prompts)
    found = both_temperatures(one, one.only("plain", one.quoted), file.stem, folder, status)
    harness.write(given.out / f"{file.stem}.json", found)
    print(bench_text(found))
    status.ahead = 0.0


def measure(given: Settings, status: Status) -> None:
    """Measure, part after part, and write.

    Raises:
        SystemExit: at the end, where rounding does not explain a difference.
    """
    folder = work_folder(given)
    one = Contestants.load(given, given.dtype, QUESTIONS, given.num_questions)
    own_file = Path(given.checkpoint) / "prompts.jsonl"
    pace = measured_pace(one, folder, status)
    later = pace * (SPEC_BENCH * one.few + OWN * one.few * own_file.is_file())
    later += pace * ALIKE * len(one.prompts)
    status.ahead = later + pace * (ROUNDING * len(one.prompts) + FLOAT32 * one.few)
    results = the_questions(one, folder, status, pace)

    number = harness.kept(
        folder / "number.json",
        lambda: affordable(status.left - later, pace * FLOAT32, one.few, len(one.prompts)),
    )
    status.ahead = later + pace * FLOAT32 * number
    status.say("loading in float32")
    exact = Contestants.load(given, "float32", QUESTIONS, number)
    part = Part("float32", exact.prompts, exact.only("plain", one.quoted), 0.0)
    runs, seen = part.answers(folder, status)
    results["float32"] = exact.document({(0.0, 1): runs}, [seen])
    results["identity"]["self_test_error"]["float32"] = tree_support(exact.subject.base).error
    results["identity"]["invariant"] = invariant(one, folder, status)
    for name, result in results.items():
        harness.write(given.out / f"{name}.json", result)
    if own_file.is_file():
        own = Contestants.load(given, given.dtype, own_file, one.few)
        results["own"] = both_temperatures(own, own.quick, "own questions", folder, status)
        harness.write(given.out / "own.json", results["own"])
    status.say("spec_bench")
    spec_bench(one, folder)
    status.ahead = 0.0
    status.say("done")
    failed = [line for name in ("bench", "float32") for line in report.failures(results[name])]
    if failed:
        raise SystemExit(f"rounding does not explain that {failed[0]} ({len(failed)} in all)")


def main() -> None:
    """Measure."""
    given = harness.parse(Settings)
    given.threads = hardware.pin_threads(given.threads)
    hardware.quiet_loading()
    with Status(given.minutes) as status:
        if given.quick:
            measure_quickly(given, given.quick, status)
        else:
            measure(given, status)


if __name__ == "__main__":
    main()
