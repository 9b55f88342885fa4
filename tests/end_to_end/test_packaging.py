"""The wheel carries settings, recipes and the embedded model, and works away from the clone."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import processes
from tests.processes import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist and from it the wheel, with the build backend that is installed."""
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel alone into an empty folder."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command.append("--no-compile")
    subprocess.run([*command, "--target", str(target), str(wheel)], check=True)
    return target


def run(site: Path, folder: Path, *arguments: str) -> str:
    """Run Python in ``folder`` with the installed wheel before everything else; return stdout."""
    done = processes.run(*arguments, cwd=folder, env={"PYTHONPATH": str(site)})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_wheel_holds_one_package(wheel: Path) -> None:
    """A second top-level package named conf or recipes would overwrite other projects'."""
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"specheads"}
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_wheel_holds_every_asset(wheel: Path) -> None:
    """An asset that the wheel lacks is found in the clone by every other test."""
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = {"conf": "conf", "recipes": "recipes", "data/tinycode": "tinycode"}
    for beside, inside in folders.items():
        tracked = subprocess.run(
            ["git", "ls-files", beside], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.split()
        for path in tracked:
            name = f"specheads/{inside}/{Path(path).relative_to(beside).as_posix()}"
            assert name in names, f"{path} is not in the wheel"
    assert any(name.startswith("specheads/conf/recipe/") for name in names)


def test_wheel_runs_from_an_empty_folder(site: Path, tmp_path: Path) -> None:
    """Paths relative to the clone or to the working folder break only once installed."""
    found = json.loads(
        run(
            site,
            tmp_path,
            "-c",
            "import json, specheads.system.files as a; from specheads.train import load_recipe;"
            "load_recipe('medusa2'); print(json.dumps([str(f()) for f in"
            "(a.conf_dir, a.recipes_dir, a.tinycode_dir)]))",
        )
    )
    assert all(Path(path).is_relative_to(site) for path in found), found
    composed = run(site, tmp_path, "-m", "specheads.train", "+recipe=medusa2", "--cfg", "job")
    assert "recipe: medusa2" in composed
    assert "train" in run(site, tmp_path, "-m", "specheads.cli", "--help")
    assert not list(tmp_path.iterdir()), "asking for the settings must leave nothing behind"


def test_wheel_loads_the_embedded_model(site: Path, tmp_path: Path) -> None:
    """An installed package whose default model is missing fails in the first command."""
    code = (
        "from specheads.models.base import load_base_model, load_tokenizer;"
        "m = load_base_model('tinycode', dtype='float32'); t = load_tokenizer('tinycode');"
        "print(sum(p.numel() for p in m.parameters()) > 1e6, len(t) <= m.config.vocab_size)"
    )
    assert run(site, tmp_path, "-c", code).split() == ["True", "True"]


def test_console_command_is_declared(wheel: Path) -> None:
    """Without the entry point ``specheads train`` is not found after installing."""
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "specheads = specheads.cli:main" in archive.read(name).decode()
