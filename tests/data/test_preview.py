"""What is shown as learned is what is learned, and nothing that is learned looks like the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as token_decoders
from transformers import PreTrainedTokenizerFast

from specheads.config import ConfigError, DataConfig, PreviewConfig, RunError
from specheads.data.chat import Encoded, Encoder, pick, render_mask, segments
from specheads.losses.cross_entropy import IGNORE
from specheads.preview import run
from specheads.system.terminal import harmless
from tests.conftest import build_byte_tokenizer

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
BYTES = build_byte_tokenizer()
TALK = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "one\n\ntwo"},
    {"role": "user", "content": "r"},
    {"role": "assistant", "content": "three"},
]
RECORD = {"id": "r", "kind": "chat", "messages": TALK}


def test_answers_and_their_end_stand_in_brackets() -> None:
    """A preview that strips special tokens hides a mask that misses eos."""
    shown = render_mask(Encoder(BYTES)(RECORD), BYTES)
    assert shown == (
        "<bos><|user|>q<|assistant|>⟦one\n\ntwo<eos>⟧<|user|>r<|assistant|>⟦three<eos>⟧"
    )
    assert "([one" in render_mask(Encoder(BYTES)(RECORD), BYTES, ("([", "])"))


def _unpaint(text: str) -> tuple[str, str]:
    """The text without colours, and the part of it on a background."""
    plain, marked, on = "", "", False
    for piece in re.split(r"(\x1b\[[\d;]*m)", text):
        if piece.startswith("\x1b"):
            on = "48;5" in piece
        else:
            plain += piece
            marked += piece if on else ""
    return plain, marked


@given(st.text(max_size=20), st.integers(0, 2**64 - 1))
@example("\x1b", 2**64 - 1)
@example("a\x1b]52;c;eA==\x07b\x9b\x7f\r\u202e", 2**64 // 3)
def test_colours_mark_the_learned_tokens(text: str, flags: int) -> None:
    """Every mask, not only those of chats, against a token by token reference."""
    ids = [257, *BYTES(text, add_special_tokens=False).input_ids][:64]
    keep = [bool(flags >> i & 1) for i in range(len(ids))]
    labels = [i if flag else IGNORE for i, flag in zip(ids, keep, strict=True)]
    encoded = Encoded("r", np.asarray(ids, np.int32), np.asarray(labels, np.int32))
    parts = list(segments(encoded, BYTES))
    assert all(a[1] != b[1] for a, b in pairwise(parts))
    uncoloured = render_mask(encoded, BYTES)
    assert harmless(uncoloured) == uncoloured
    if text.isascii():
        plain, marked = _unpaint(render_mask(encoded, BYTES, None))
        assert plain == harmless(BYTES.decode(ids))
        slow = "".join(BYTES.decode([i]) for i, flag in zip(ids, keep, strict=True) if flag)
        assert marked == harmless(slow).replace("\n", "")


def test_colour_ends_with_the_line() -> None:
    """Terminals paint the rest of a line whose end is still in colour."""
    shown = render_mask(Encoder(BYTES)(RECORD), BYTES, None)
    assert all(line.count("\x1b[0m") * 2 == line.count("\x1b[") for line in shown.splitlines())
    assert not any(line.startswith("\x1b[0m") for line in shown.splitlines())


def test_the_space_before_an_answer_is_shown() -> None:
    """Some tokenizers drop the first space of a text; runs decoded alone would be glued."""
    backend = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "▁c": 2}, unk_token="▁a"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = token_decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    ids, labels = np.asarray([0, 1, 2], np.int32), np.asarray([IGNORE, 1, IGNORE], np.int32)
    assert tokenizer.decode([1]) == "b"
    assert render_mask(Encoded("r", ids, labels), tokenizer) == "a⟦ b⟧ c"


def test_every_kind_is_shown() -> None:
    """The kind with the broken mask may be one record in a thousand."""
    records = [{"id": str(i), "kind": "rare" if i == 777 else "common"} for i in range(1000)]
    for seed in range(5):
        chosen = pick(records, 3, seed)
        assert len({r["id"] for r in chosen}) == len(chosen) == 3
        assert {r["kind"] for r in chosen} == {"rare", "common"}
        assert pick(records, 3, seed) == chosen
    assert pick(records, 3, 0) != pick(records, 3, 1)
    assert len(pick(records, 1, 0)) == 2
    assert pick(records, 0, 0) == []


def _file(path: Path, records: list[Any]) -> DataConfig:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataConfig(source="jsonl", path=str(path), seq_len=64)


def test_what_is_left_out_is_counted(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records that vanish between the file and the rows are found by nobody afterwards."""
    records: list[Any] = [{"messages": [*TALK[:1], *TALK[3:]], "id": i} for i in range(97)]
    for i, record in enumerate(records):
        record["messages"] = [{**record["messages"][0], "content": f"q{i}"}, TALK[3]]
    records += [{"prompt": "p"}, {"text": "t" * 40, "kind": "long one", "id": "x"}]
    records += [{"messages": [{"role": "user", "content": "q" * 100}, TALK[3]], "id": "y"}]
    data = _file(tmp_path / "d.jsonl", records)
    data.eval_fraction = 0.001
    run(PreviewConfig(model=str(tiny_model_dir), data=data, num_records=2, color="never"))
    out = capsys.readouterr().out
    assert "x (long one): 41 tokens, 41 learned (100.0%)\n⟦" + "t" * 40 + "<eos>⟧\n" in out
    assert "1 dropped: longer than data.seq_len" in out
    assert "read: 1 of 100 records dropped: 1 without a content" in out
    tokens, learned = re.search(r"mask: ([\d,]+) tokens, (\d+) learned", out).groups()
    assert int(learned) == 6 * ((int(learned) - 41) // 6) + 41
    assert 500 < int(tokens.replace(",", "")) < 1500
    rows, full = re.search(r"packed: (\d+) rows of 64 tokens, ([\d.]+)% full", out).groups()
    assert abs(float(full) / 100 * int(rows) * 64 - int(tokens.replace(",", ""))) < 0.01 * 1500
    assert "a sample" not in out
    data.max_records = 5
    run(PreviewConfig(model=str(tiny_model_dir), data=data, num_records=0))
    out = capsys.readouterr().out
    assert out.startswith("train: 5 records, ")
    assert "a sample; data.max_records=5" in out


def test_a_mask_of_zeros_is_an_error_that_names_the_template(
    tmp_path: Path,
    tiny_model_dir: Path,
    make_byte_tokenizer: MakeTokenizer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Training would run, and the loss be 0 or NaN from its first step."""
    questions = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(9)]
    data = _file(tmp_path / "d.jsonl", questions)
    config = PreviewConfig(model=str(tiny_model_dir), data=data, num_records=1, color="never")
    with pytest.raises(RunError, match=f"all labels are masked.*template of {tiny_model_dir}"):
        run(config)
    assert "0 learned (0.0%)\n<bos><|user|>question" in capsys.readouterr().out
    idle = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    )
    make_byte_tokenizer(idle).save_pretrained(tmp_path / "idle")
    talks = [{"messages": [{**TALK[0], "content": f"q{i}"}, TALK[1]]} for i in range(9)]
    config.data, config.model = _file(tmp_path / "d.jsonl", talks), str(tmp_path / "idle")
    with pytest.raises(RunError, match=f"template of {tmp_path}/idle marks no token"):
        run(config)
    assert "cannot be encoded: record d.jsonl:" in capsys.readouterr().out


def test_a_missing_file_is_wrong_usage(tiny_model_dir: Path) -> None:
    """Exit code 1 says that the data is at fault, 2 the command line."""
    data = DataConfig(source="jsonl", path="/no/such.jsonl")
    with pytest.raises(ConfigError, match="/no/such.jsonl"):
        run(PreviewConfig(model=str(tiny_model_dir), data=data))


def test_data_cannot_steer_the_terminal(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Looking at a stranger's data is what the preview is for, and is often piped into a pager."""
    foreign = "\x1b]52;c;ZXZpbA==\x07\x9b2J"
    talk = [{"role": "user", "content": foreign}, {"role": "assistant", "content": foreign}]
    records = [{"messages": talk, "id": f"{foreign}{i}", "kind": foreign} for i in range(20)]
    records += [{"messages": [{"role": foreign, "content": "x"}], "id": foreign}]
    data = _file(tmp_path / "d.jsonl", records)
    data.max_bad_fraction = 0.5
    for color in ("never", "always"):
        run(PreviewConfig(model=str(tiny_model_dir), data=data, num_records=3, color=color))
        out, err = capsys.readouterr()
        assert out.count(harmless(foreign)) >= 9
        plain = re.sub(r"\x1b\[[\d;]*m", "", out) if color == "always" else out
        assert harmless(plain) == plain and harmless(err) == err
