"""Damaged exports end in one line that names the file; nothing is loaded in part, or by guessing.

Against a manifest every change is found. A stranger writes the manifest too: then what a file says
is still held to types, ranges and the shapes of the tensors. A number that stays in its range
(another weight, another rank of the tree) is then another model, and cannot be told from one.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specheads.models.manifest import MANIFEST, write_manifest
from tests.damaged import damaged, flip, replace_value
from tests.export_kinds import KINDS, build_exports, files_of, refusal


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> dict[str, Path]:
    """One export of every kind; tests put back what they damage."""
    return build_exports(tmp_path_factory.mktemp("exports"), tiny_model_dir)


def test_the_undamaged_ones_load(exports: dict[str, Path]) -> None:
    """All that follows would hold for exports that never load."""
    for path in exports.values():
        assert refusal(path) is None
        assert {MANIFEST} | set(json.loads((path / MANIFEST).read_text())["files"]) == {
            file.relative_to(path).as_posix() for file in files_of(path)
        }


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
def test_every_change_of_every_file_is_found(exports: dict[str, Path], seed: int) -> None:
    """A flipped bit in a weight decodes, only with less accepted: nobody would ever notice."""
    random = Random(seed)
    path = exports[random.choice(KINDS)]
    file = random.choice(files_of(path))
    content = flip(file.read_bytes(), random)
    before = file.read_bytes()
    with damaged(file, content):
        line = refusal(path)
    if file.name == MANIFEST and line is None:
        assert json.loads(content) == json.loads(before), "a space may be of another kind"
        return
    assert line is not None and str(path) in line, (file, line)
    assert file.name in line or file.name == MANIFEST, (file, line)


def check_with_a_matching_manifest(exports: dict[str, Path], seed: int) -> None:
    """Damage one file, write the manifest anew, and load: one line, or a model."""
    random = Random(seed)
    path = exports[random.choice(KINDS)]
    files = [each for each in files_of(path) if each.name != MANIFEST]
    if random.random() < 0.8:  # what is not under the digest of the tokenizer
        files = [each for each in files if "token" not in each.name]
    file = random.choice(files)
    data = file.read_bytes()
    if file.suffix == ".json" and random.random() < 0.7:
        content = replace_value(data.decode(), random).encode()
    else:
        content = flip(data, random)
    listed = (path / MANIFEST).read_bytes()
    try:
        with damaged(file, content):
            write_manifest(path)
            try:
                line = refusal(path)
            except BaseException as error:
                raise AssertionError(f"{path.name}/{file.name}, seed {seed}: {error!r}") from error
            assert line is None or str(path) in line, line
    finally:
        (path / MANIFEST).write_bytes(listed)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_damage_under_a_matching_manifest(exports: dict[str, Path], seed: int) -> None:
    """Who can write the files can write the manifest; it must not be all that stands there."""
    check_with_a_matching_manifest(exports, seed)


@pytest.mark.slow
@given(seed=st.integers(0, 2**32))
@settings(max_examples=3000, suppress_health_check=list(HealthCheck))
def test_much_damage_under_a_matching_manifest(exports: dict[str, Path], seed: int) -> None:
    """The same, for long."""
    check_with_a_matching_manifest(exports, seed)
