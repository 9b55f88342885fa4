"""Try the wheel as a stranger gets it: alone, then with every extra.

    python scripts/check_wheel.py
    python scripts/check_wheel.py --python python3.13

Builds the wheel and installs it, at the versions of constraints.txt, into a new environment of the
given Python. Without extras it has to decode an export, and to name every extra that a command
lacks in one line. With ``[all]`` every recipe has to take four steps. It needs an index of
packages, some gigabytes and minutes.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXPORT = ROOT / "data" / "checkpoints" / "hydra"
# what a command lacks where an extra is not installed; wandb's absence ends no run
LACKING = {
    "train": ["train", "+recipe=medusa1", "data=hub", "data.path=org/name"],
    "plots": ["bench", f"checkpoint={EXPORT}", "report=page.html"],
    "quant": ["train", "+recipe=medusa1", "model.quantization=nf4"],
    "deepspeed": ["train", "+recipe=medusa1", "deepspeed=zero2"],
    "gguf": ["generate", "checkpoint=model.gguf", "prompt=a"],
}
SHORT = ["steps=4", "data.max_records=200", "evaluate.num_prompts=1", "evaluate.max_new_tokens=16"]


def main(argv: Sequence[str] | None = None) -> None:
    """Build, install, try; end at the first thing that is not so."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", default=sys.executable, help="that the environment is made of")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        try_out(given.python, Path(folder))


def try_out(python: str, folder: Path) -> None:
    """Try the wheel in an environment of ``python`` that is made in ``folder``."""
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    called(build, folder)
    (wheel,) = folder.glob("specheads-*.whl")
    place, empty = folder / "env", folder / "empty"
    empty.mkdir()
    called([python, "-m", "venv", "--clear", str(place)], empty)
    install = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    install += ["--constraint", str(ROOT / "constraints.txt")]
    specheads = str(place / "bin" / "specheads")

    called([*install, str(wheel)], empty)
    version = called([str(place / "bin" / "python"), "--version"], empty)
    size = sum(path.lstat().st_size for path in place.rglob("*")) / 1e9
    print(f"{version.strip()}: {wheel.name} and what it needs, {size:.2f} GB", flush=True)
    asked = ["prompt=def add(a, b):", "max_new_tokens=32"]
    words = ["generate", f"checkpoint={EXPORT}", *asked]
    said = called([specheads, *words], empty)
    here = called([sys.executable, "-m", "specheads.cli", *words], ROOT)
    # the last line has the speed
    if said.strip().splitlines()[:-1] != here.strip().splitlines()[:-1]:
        raise SystemExit(f"without extras {EXPORT.name} does not write what it does here:\n{said}")
    print("without extras: an export decodes", flush=True)
    (empty / "model.gguf").write_bytes(b"GGUF")
    for extra, words in LACKING.items():
        line = called([specheads, *words], empty, code=2).strip()
        if line.count("\n") or f"pip install 'specheads[{extra}]'" not in line:
            raise SystemExit(
                f"{' '.join(words)} does not name its extra {extra} in a line:\n{line}"
            )
        print(f"without [{extra}]: {line}", flush=True)

    called([*install, f"{wheel}[all]"], empty)
    print("[all] is installed", flush=True)
    for recipe in sorted(path.stem for path in (ROOT / "conf" / "recipe").glob("*.yaml")):
        begin = time.perf_counter()
        called([specheads, "train", f"+recipe={recipe}", *SHORT], empty)
        (export,) = empty.glob("runs/*/export")
        export.parent.rename(empty / f"{recipe}-done")
        print(f"{recipe}: 4 steps, {time.perf_counter() - begin:.0f} s", flush=True)


def called(command: Sequence[str], folder: Path, code: int = 0) -> str:
    """Call a command in ``folder``; return what it printed.

    Raises:
        SystemExit: if it ends with another code than ``code``.
    """
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode != code:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}, not {code}:\n{said}")
    return said


if __name__ == "__main__":
    main()
