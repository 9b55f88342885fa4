"""The doctor on machines where parts are missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specheads import doctor
from specheads.config import DoctorConfig, RunError
from specheads.measure import installation
from specheads.measure.installation import (
    PACKAGES,
    Package,
    Part,
    examine_installation,
    try_imports,
)

ROOT = Path(__file__).parents[2]
OPTIONAL = [package for package in PACKAGES if not package.required]


def parts(**options: bool) -> dict[str, Part]:
    """Return the parts of the installation, by name."""
    return {part.name: part for part in examine_installation(imports=False, **options)}


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes packages, and programs, look as if they were not there."""

    def hidden(*names: str, programs: tuple[str, ...] = ()) -> None:
        version, spec = importlib.metadata.version, importlib.util.find_spec
        which = installation.shutil.which
        modules = {package.module for package in PACKAGES if package.name in names}

        def no_version(name: str) -> str:
            if name in names:
                raise importlib.metadata.PackageNotFoundError(name)
            return version(name)

        monkeypatch.setattr(importlib.metadata, "version", no_version)
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *more: None if name in modules else spec(name)
        )
        monkeypatch.setattr(
            installation.shutil, "which", lambda name: None if name in programs else which(name)
        )

    return hidden


def test_every_package_the_code_asks_for_is_known() -> None:
    """A dependency that the doctor does not know is one that nobody is told about."""
    import tomllib

    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = table["optional-dependencies"]
    needed = table["dependencies"] + [x for name, of in extras.items() if name != "dev" for x in of]
    names = {re.match(r"[\w.-]+", each).group() for each in needed}  # type: ignore[union-attr]
    assert names - {"specheads"} <= {package.name for package in PACKAGES}  # whose extras they are
    wanted = installation.requirements()
    assert wanted["deepspeed"] == next(x for x in needed if x.startswith("deepspeed"))


@pytest.mark.parametrize("package", OPTIONAL, ids=lambda package: package.name)
def test_a_missing_part_is_named_with_its_command(
    package: Package, hide: Callable[..., None]
) -> None:
    """A run that fails an hour later with ModuleNotFoundError, and a guess at the right name."""
    hide(package.name)
    part = parts()[package.name]
    assert not part.ok and part.wanting and not part.found
    assert part.use and "missing" in part.line()
    assert f"pip install {package.name}" in part.command.replace("'", "")


def test_a_clean_machine(tmp_path: Path) -> None:
    """The machine that needs the doctor most has nothing but Python, and no command line either."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "specheads.cli", "doctor", "json=true"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    named = {part["name"]: part for part in found["parts"]}
    optional = {package.name for package in OPTIONAL} | {"C++ compiler"}
    required = {package.name for package in PACKAGES if package.required}
    assert set(found["missing"]) >= {package.name for package in OPTIONAL}
    assert set(found["wrong"]) == required
    assert all(not named[name]["ok"] for name in optional | required)
    for package in PACKAGES:
        assert named[package.name]["command"].startswith(f"{sys.executable} -m pip install ")
        assert named[package.name]["command"] in done.stderr
    assert "'torch>=" in named["torch"]["command"], "the versions of the clone"
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("specheads: nothing works without torch, transformers")


def test_tools_beside_python(
    hide: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """DeepSpeed's own words for a missing compiler are a page long and name a file of its own."""
    monkeypatch.delenv("CXX", raising=False)
    hide(programs=("c++", "g++", "clang++", "dnf", "apk"))
    monkeypatch.setattr(installation.sysconfig, "get_path", lambda name: str(tmp_path))
    found = parts()
    assert not found["C++ compiler"].ok and not found["Python headers"].ok
    assert f"no Python.h in {tmp_path}" in found["Python headers"].line()
    if installation.shutil.which("apt-get"):
        assert found["C++ compiler"].command.endswith("apt-get install -y g++")
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        assert found["Python headers"].command.endswith(f"python{version}-dev")


def test_a_compiler_that_is_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler that is there says nothing; C++20 is what the kernels are written in."""
    old = tmp_path / "old-c++"
    old.write_text("#!/bin/sh\necho 'unknown option -std=c++20' >&2; exit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    part = parts()["C++ compiler"]
    assert part.found == str(old) and part.problem == "compiles no C++20" and not part.ok


def test_versions_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old DeepSpeed steps on NaN: there is not good enough."""
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda n: "0.10.0" if n == "deepspeed" else version(n)
    )
    part = parts()["deepspeed"]
    assert not part.ok and part.wanting
    assert "0.10.0, needs deepspeed>=" in part.line()
    assert installation._new_enough("2.13.0+cpu", "torch>=2.11")
    assert not installation._new_enough("6.1", "transformers>=5.17,<6")


def test_what_cannot_be_imported_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel for another processor installs well and takes the process along when imported."""
    for name, code in {
        "sound_part": "print('good news')",
        "broken_part": "raise OSError('libnothing.so: cannot\\nopen')",
        "deadly_part": "import os; os._exit(7)",
        "late_part": "import sys; sys.exit(3)",
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    assert try_imports(["deadly_part", "sound_part", "broken_part", "late_part"]) == {
        "deadly_part": "the process ended with 7",
        "sound_part": "",
        "broken_part": "OSError: libnothing.so: cannot open",
        "late_part": "SystemExit: 3",
    }
    assert try_imports([]) == {}
    (tmp_path / "jealous_part.py").write_text("import sys; assert 'sound_part' not in sys.modules")
    assert try_imports(["sound_part"]) == {"sound_part": ""}
    assert set(try_imports(["sound_part", "jealous_part"]).values()) == {"AssertionError:"}


def test_the_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit code of success above a machine on which nothing runs."""
    torch = Part(
        "torch", "everything", "2.13.0", "cannot be imported: ImportError", "mend it", True
    )
    wandb = Part("wandb", "log.wandb", command="add it")
    gpu = Part("GPU", "large models", problem="none in this machine")
    for given, code in (([wandb, gpu], 0), ([torch, wandb], 1), ([gpu], 0)):
        monkeypatch.setattr(installation, "examine_installation", lambda given=given: given)
        if code:
            with pytest.raises(RunError, match="nothing works without torch"):
                doctor.run(DoctorConfig())
        else:
            doctor.run(DoctorConfig())
    out = capsys.readouterr().out
    assert "wandb           missing (for log.wandb)\n                add it\n" in out
    assert "torch           WRONG: 2.13.0, cannot be imported: ImportError" in out
    assert "verdict         works; without wandb\n" in out
    assert out.endswith("verdict         works, and nothing is missing\n")


def test_a_gpu_that_nothing_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that nobody mentions stays unused for weeks."""
    monkeypatch.setattr(installation.shutil, "which", lambda name: None)
    for number, (vendor, kind) in enumerate([("0x8086", "0x030000"), ("0x10de", "0x040300")]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "vendor").write_text(vendor + "\n")
        (tmp_path / str(number) / "class").write_text(kind + "\n")
    assert not installation.has_nvidia_device(tmp_path), "a sound card is no GPU"
    (tmp_path / "1" / "class").write_text("0x030200\n")
    assert installation.has_nvidia_device(tmp_path)
    monkeypatch.setattr(installation, "has_nvidia_device", lambda: True)
    import torch

    if torch.version.cuda is None:
        part = installation._gpu()
        assert "torch was built without CUDA" in part.problem
        assert part.command.endswith("pip install --force-reinstall torch")
