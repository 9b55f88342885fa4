"""Secrets do not get into what a run writes or prints."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specheads.system.redact import HIDDEN, redact, secret_values

VARIABLES = (
    "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_TOKEN", "X_KEY", "SOME_SECRET",
    "DB_PASSWORD", "token", "GITHUB_PAT", "APP_CREDENTIALS",
)  # fmt: skip


@pytest.mark.parametrize("name", VARIABLES)
def test_values_of_secret_variables_are_hidden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that repeats a variable (``x=$HF_TOKEN``) would publish it with the run."""
    monkeypatch.setenv(name, "c4nary-value")
    settings = {"data": {"path": "/mnt/c4nary-value/x", "notes": ["c4nary-value", 3, None, True]}}
    hidden = redact(settings)
    assert "c4nary" not in json.dumps(hidden)
    assert hidden == {"data": {"path": f"/mnt/{HIDDEN}/x", "notes": [HIDDEN, 3, None, True]}}
    assert settings["data"]["path"] == "/mnt/c4nary-value/x", "the run itself needs it"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://user:pw@host/x.jsonl", "https://***@host/x.jsonl"),
        ("https://user:p@w@host/x", "https://***@host/x"),
        ("cannot read https:/user:pw@host/x", "cannot read https:/***@host/x"),
        ("data.path=https://t0ken@host:80/x", "data.path=https://***@host:80/x"),
        ("s3://a:b@bucket and ssh://c@d", "s3://***@bucket and ssh://***@d"),
        ("https://h/x?a=1&X-Amz-Signature=abc&b=2", "https://h/x?a=1&X-Amz-Signature=***&b=2"),
        ("https://h/x?sig=abc", "https://h/x?sig=***"),
        ("Authorization: Bearer abcdefgh12345678", "Authorization: Bearer ***"),
        ("hf_abcdefghijklmnopqrstuvwxyz is mine", "hf_*** is mine"),
        ("sk-proj-abcdefghijklmnopqrst", "sk-***"),
        ("AKIAABCDEFGHIJKLMNOP", "***"),
        ("+my.api_key=abc steps=3", "+my.api_key=*** steps=3"),
        ("HF_TOKEN=abc python", "HF_TOKEN=*** python"),
        ("++db.password=abc", "++db.password=***"),
    ],
)
def test_secrets_are_known_by_their_form(text: str, expected: str) -> None:
    """What was never in the environment is given away by a command line all the same."""
    assert redact(text) == expected
    assert redact([{"argv": (text,)}]) == [{"argv": (expected,)}]
    assert redact(expected) == expected


@pytest.mark.parametrize(
    "text",
    [
        "step 3/8  loss 2.31  head_0 45.1%", "https://huggingface.co/org/name", "a@b.c",
        "user@host:/x", "tokens_per_second=3", "bos_token=<bos>", "data.path=/a/b@c/x.jsonl",
        "git@github.com:org/name", "+recipe=medusa1 model=tinycode optim.lr=1e-3", "task-force",
        "HF_HOME=/x", "keys=3", "num_key_value_heads=2", "https://h/x?page=2&id=3",
    ],
)  # fmt: skip
def test_ordinary_texts_stay(text: str) -> None:
    """A record of a run with holes in it cannot be repeated."""
    assert redact(text) == text
    assert redact({"eos_token": "<eos>", "pad_token_id": 3})["eos_token"] == "<eos>"


def test_keys_of_json_that_name_secrets() -> None:
    """A nested setting is not written as ``name=value``."""
    found = redact({"server": {"api_key": "abc", "password": "x", "access_token": "y", "port": 3}})
    assert found == {
        "server": {"api_key": HIDDEN, "password": HIDDEN, "access_token": HIDDEN, "port": 3}
    }


def test_names_of_settings_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A password that is an English word must not tear a config apart."""
    monkeypatch.setenv("MY_PASSWORD", "training")
    monkeypatch.setenv("SHORT_KEY", "1")
    assert redact({"training": {"steps": 1, "data": "training"}}) == {
        "training": {"steps": 1, "data": HIDDEN}
    }


def test_what_is_a_secret_variable() -> None:
    """Paths and flags of the environment are no secrets; a short value would hide every text."""
    environ = {
        "HOME": "/home/someone", "TOKENIZERS_PARALLELISM": "false", "HF_TOKEN": "abcdef",
        "A_KEY": "abcdefgh", "B_KEY": "short", "SSH_KEY_PATH": "/home/key",
    }  # fmt: skip
    assert secret_values(environ) == ["abcdefgh", "abcdef"]


@given(
    secret=st.text("ABC/:@=&?.% \\'\"é", min_size=6, max_size=20).filter(str.strip),
    before=st.text("xyz ", max_size=10),
    after=st.text("xyz ", max_size=10),
)
@settings(max_examples=200)
def test_no_text_shows_a_secret(secret: str, before: str, after: str) -> None:
    """Whatever surrounds it, and whatever it looks like to a pattern."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANARY_TOKEN", secret)
        assert secret not in redact({"x": [before + secret + after]})["x"][0]
