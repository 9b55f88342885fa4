"""Canaries: secrets of the environment and of the command line reach nothing that a run leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.commands import SHORT, on_files, start

SECRETS = {
    "HF_TOKEN": "hf_c4naryHuggingFace0123456789",
    "WANDB_API_KEY": "c4narywandb" + "0123456789abcdef" * 2,
    "AWS_SECRET_ACCESS_KEY": "c4naryAws/0123456789+abcdefghijklmnop",
    "OPENAI_API_KEY": "sk-c4naryOpenai0123456789",
    "MY_REGISTRY_PASSWORD": "c4nary-password",
    "SOME_SERVICE_SECRET": "c4nary.service.secret",
    "X_TOKEN": "c4naryplain",
}
IN_URL = "c4naryuser:c4naryurl"
assert all("c4nary" in value for value in (*SECRETS.values(), IN_URL))


def leaks(folder: Path) -> list[str]:
    """Return the files below ``folder`` whose name or content holds a canary."""
    return [
        str(path.relative_to(folder))
        for path in sorted(folder.rglob("*"))
        if "c4nary" in path.name or (path.is_file() and b"c4nary" in path.read_bytes())
    ]


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set every canary."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("secrets")
def test_a_run_leaves_no_secret(
    tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Run folders are published, and copied to where others read them."""
    folder = tmp_path / SECRETS["MY_REGISTRY_PASSWORD"]  # settings that hold a secret all the same
    folder.mkdir()
    records = folder / "records.jsonl"
    lines = tiny_jsonl.read_text().splitlines()
    records.write_text("\n".join([*lines, '{"id": "bad"}']) + "\n")  # one for the quarantine
    run_dir = tmp_path / "run"
    arguments = (
        "+recipe=medusa1", *on_files(tiny_model_dir, records, run_dir), *SHORT,
        "log.wandb=offline", "data.max_bad_fraction=0.5",
        "evaluate.num_prompts=1", "checkpoint.every=2",
    )  # fmt: skip
    assert start(monkeypatch, *arguments) == 0
    out = capfd.readouterr()
    assert "c4nary" not in out.out + out.err
    assert leaks(run_dir) == []
    # and what was hidden was there: the same places hold the rest of it
    assert "***/records.jsonl" in (run_dir / "config.yaml").read_text()
    (first,) = json.loads((run_dir / "provenance.json").read_text())
    assert any("data.path=" in word and "***" in word for word in first["argv"])
    state = next((run_dir / "checkpoints").glob("step-*/state.json"))
    assert json.loads(state.read_text())["settings"]["data.path"].endswith("***/records.jsonl")
    assert list((run_dir / "wandb").glob("offline-run-*/*.wandb"))
    assert (run_dir / "export" / "config.json").is_file()
    # settings are compared in order: what is hidden is the same again, the first to differ is steps
    assert start(monkeypatch, *arguments, "resume=auto", "steps=6") == 2
    err = capfd.readouterr().err
    assert "steps was 4, is 6" in err and "c4nary" not in err
    assert leaks(run_dir) == []


@pytest.mark.usefixtures("secrets")
@pytest.mark.parametrize(
    "argument",
    [f"data.path=https://{IN_URL}@host.invalid/x.jsonl", f"model=https://{IN_URL}@host.invalid/x/y",
     f"data.path=/nowhere/{SECRETS['SOME_SERVICE_SECRET']}.jsonl", f"optim.lr={IN_URL}-key",
     f"+my.api_key={SECRETS['HF_TOKEN']}", f"recip={SECRETS['OPENAI_API_KEY']}"],
)  # fmt: skip
def test_no_message_quotes_a_secret(
    tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path, argument: str,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Messages are pasted into issues."""
    if argument.startswith("optim.lr"):
        argument = argument.replace(IN_URL, SECRETS["X_TOKEN"])
    files = on_files(tiny_model_dir, tiny_jsonl, tmp_path / "run")
    assert start(monkeypatch, "+recipe=medusa1", *files, *SHORT, argument) == 2
    out = capfd.readouterr()
    assert "c4nary" not in out.out + out.err
    assert out.err.startswith("specheads: ") and len(out.err.splitlines()) == 1
    assert leaks(tmp_path) == []
