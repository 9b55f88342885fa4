"""A base that only a server holds: its log-probabilities, from the answers to a draft model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specheads.config import ConfigError, RegenerateConfig, RunError
from specheads.data.chat import Encoded, Encoder
from specheads.data.schema import unpacked_top
from specheads.data.teacher_cache import TeacherCache, check_told, plan_top_logits, write_cache
from specheads.decoding.conversation import text_of
from specheads.losses.cross_entropy import IGNORE
from specheads.models.base import end_tokens, load_base_model, load_tokenizer
from specheads.models.draft import load_draft
from specheads.models.manifest import read_provenance
from specheads.regeneration.answering import regenerate
from specheads.regeneration.dialogue import Answer, TurnEncoder, dialogue, retold
from specheads.system.files import write_whole
from tests.conftest import build_byte_tokenizer
from tests.end_to_end.commands import SHORT, on_files, start
from tests.regeneration.test_endpoint import Script, Server, serve

__all__ = ["serve"]  # a fixture
TOP, LONGEST = 6, 9


def played_by(folder: Path, form: str, *, off: int = 0, letters: bool = True) -> Script:
    """Return a server's script: the model of a folder, which names tokens as ``form`` does.

    Every other answer ends before the limit. Its ids are ``off`` by so many. Texts of ``letters``
    give their tokens back; others hold halves of characters, which do not.
    """
    base, tokenizer = load_base_model(str(folder)), load_tokenizer(str(folder))
    ends, encoder = end_tokens(base, tokenizer), Encoder(tokenizer)

    def named(token: int, log_prob: float) -> dict[str, Any]:
        if form == "llama.cpp":
            return {"id": token + off, "token": "x", "logprob": log_prob}
        return {"token": f"token_id:{token + off}", "logprob": log_prob}

    @torch.inference_mode()
    def script(number: int, path: str, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        said = {key: body[key] for key in ("messages", "prompt") if key in body}
        ids = encoder.prompt({"id": "x", "completion": "", **said})
        places, new = [], list[int]()
        while len(new) < body["max_tokens"] and not (new and new[-1] in ends):
            log_probs = base(torch.tensor([ids + new])).logits[0, -1].log_softmax(-1)
            best = log_probs.topk(TOP)
            due = len(ids) % 2 == 0 and len(new) == 4
            letter = 97 + int(log_probs[97:123].argmax()) if letters else 0xC3
            new.append(ends[0] if due else letter)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            top = [named(*pair) for pair in pairs][::-1]  # servers promise no order
            places.append(named(new[-1], float(log_probs[new[-1]])) | {"top_logprobs": top})
        ended = new[-1] in ends
        text = text_of(tokenizer, new[:-1] if ended else new)
        choice: dict[str, Any] = {"finish_reason": "stop" if ended else "length"}
        if "messages" in body:
            assert body["logprobs"] is True and body["top_logprobs"] == TOP
            choice |= {"message": {"content": text}, "logprobs": {"content": places}}
        else:
            assert body["logprobs"] == TOP
            tops = [{x["token"]: x["logprob"] for x in each["top_logprobs"]} for each in places]
            listed = {"tokens": [each["token"] for each in places], "top_logprobs": tops}
            choice |= {"text": text}
            choice["logprobs"] = listed if form == "vLLM" else {"content": places}
        return 200, {"choices": [choice], "usage": {"completion_tokens": len(new)}}, {}

    return script


def answered(
    server: Server, model: Path, prompts: Path, output: Path, **more: Any
) -> dict[str, Any]:
    """Let the server answer; return what ``regenerate`` says."""
    settings: dict[str, Any] = {
        "model": str(model), "endpoint": server.url, "logprobs": TOP, "prompts": str(prompts),
        "output": str(output), "endpoint_model": "m", "max_new_tokens": LONGEST,
        "keep_truncated": True, "retries": 0,
    }  # fmt: skip
    return regenerate(RegenerateConfig(**(settings | more)), print)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Return records of one turn, of two, and of a prompt alone."""
    ask = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "?"}]
    lines = [
        {"id": f"{n}", "messages": [{"role": "user", "content": "q" * (n + 1)}]} for n in range(8)
    ]
    lines += [{"id": f"two/{n}", "messages": [*ask, *ask[: n + 1]]} for n in range(2)]
    lines += [{"id": "pair", "prompt": "def f", "completion": "x"}]
    path = tmp_path / "prompts.jsonl"
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("form", ["vLLM", "llama.cpp"])
def test_what_a_server_says_is_what_the_base_would_say(
    form: str, tmp_path: Path, tiny_model_dir: Path, prompts: Path,
    serve: Callable[[Script], Server], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rows that are off by one place train a draft model on its neighbours, and nothing fails."""
    output = tmp_path / "answers.jsonl"
    server = serve(played_by(tiny_model_dir, form))
    assert answered(server, tiny_model_dir, prompts, output)["done"] == 11
    described = tmp_path / "described"  # all of the base but its weights
    shutil.copytree(tiny_model_dir, described, ignore=shutil.ignore_patterns("*.safetensors"))
    base = load_base_model(str(tiny_model_dir))
    encoder = Encoder(load_tokenizer(str(described)))
    for line in output.read_text().splitlines():
        record = json.loads(line)
        assert encoder.is_stored(record)
        spans, ids = record["tokens"]["answers"], record["tokens"]["ids"]
        learned = [t for start, stop in spans for t in range(start, stop)]
        told, log_probs = unpacked_top(record["tokens"]["top"], len(learned))
        with torch.inference_mode():
            truth = base(torch.tensor([ids])).logits[0].log_softmax(-1)[[t - 1 for t in learned]]
        best = truth.topk(TOP)
        assert np.array_equal(told, best.indices)
        assert np.allclose(log_probs, best.values, atol=1e-4)
    run_dir = tmp_path / "run"
    words = [
        *on_files(described, output, run_dir), *SHORT, "+recipe=distill", "draft.hidden=16",
        "autocast=none", "draft.learn_prompts=false", f"draft.stored={tmp_path / 'stored'}",
        "draft.stored_top_k=4", "data.eval_fraction=0.2",
    ]  # fmt: skip
    assert start(monkeypatch, *words) == 0
    draft = load_draft(str(run_dir / "export"), tokenizer=encoder.tokenizer)
    assert draft.config.hidden_size == 16
    found = read_provenance(run_dir / "export")
    assert found is not None and found["base"]["digest"] == "" and found["measured"] == {}
    index = json.loads((tmp_path / "stored" / "index.json").read_text())
    assert "log-probabilities of the records" in index["made_of"] and index["top_k"] == 4
    stored = load_file(tmp_path / "stored" / "top-00000.safetensors")
    assert len(stored["ids"]) == sum(index["lengths"])
    assert (stored["log_probs"].exp().sum(1) < 1.001).all()


def test_without_weights_nothing_is_promised_that_needs_them(
    tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A run that finds out after training that it cannot measure has cost hours."""
    described = tmp_path / "described"
    shutil.copytree(tiny_model_dir, described, ignore=shutil.ignore_patterns("*.safetensors"))
    words = [*on_files(described, tiny_jsonl, tmp_path / "run"), *SHORT, "+recipe=distill"]
    stored = [f"draft.stored={tmp_path / 'stored'}", "draft.learn_prompts=false"]
    for more, said in (
        ([], "the draft model has no teacher"),
        ([*stored, "draft.start=base"], "draft.start=base copies some"),
        ([*stored, "evaluate.every=2"], "evaluate.every=2 decodes with them"),
        (stored, "training records bring no likeliest tokens along"),
    ):
        assert start(monkeypatch, *words, *more) != 0
        assert said in capsys.readouterr().err
    assert start(monkeypatch, *words, "draft.loss=labels") == 0
    assert "holds no weights to decode with" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("form", "off", "more", "reason"),
    [
        ("words", 0, {}, "by their ids"),
        ("vLLM", 0, {"logprobs": TOP + 1}, "by their ids"),
        ("vLLM", 1, {}, "makes another text"),
    ],
)
def test_what_cannot_be_distilled_from_is_said(
    form: str, off: int, more: dict[str, Any], reason: str, tmp_path: Path, tiny_model_dir: Path,
    prompts: Path, serve: Callable[[Script], Server], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Tokens of another vocabulary, or cut short, train towards noise."""
    output = tmp_path / "answers.jsonl"
    script = played_by(tiny_model_dir, "vLLM", off=off)

    def odd(number: int, path: str, body: dict[str, Any]) -> Any:
        body |= {"top_logprobs": TOP, "logprobs": True if "messages" in body else TOP}
        found: Any = script(number, path, body)
        if form == "words":
            text = json.dumps(found[1]).replace("token_id:", "word ")
            return found[0], json.loads(text), found[2]
        return found

    with pytest.raises(RunError, match="no record was answered|never answered"):
        answered(serve(odd), tiny_model_dir, prompts, output, **more)
    bad = (tmp_path / "answers.jsonl.bad.jsonl").read_text()
    assert reason in bad


def test_an_answer_is_not_continued_behind_other_tokens(
    tmp_path: Path, tiny_model_dir: Path, prompts: Path, serve: Callable[[Script], Server]
) -> None:
    """A server reads earlier answers as texts: what it says then is of another conversation."""
    output = tmp_path / "answers.jsonl"
    answered(
        serve(played_by(tiny_model_dir, "vLLM", letters=False)), tiny_model_dir, prompts, output
    )
    bad = [json.loads(line) for line in Path(f"{output}.bad.jsonl").read_text().splitlines()]
    assert {line["id"] for line in bad} == {"two/0", "two/1"} and "earlier answer" in bad[0][
        "detail"
    ]


def test_the_command_knows_whose_tokens_they_are(
    tmp_path: Path, tiny_model_dir: Path, prompts: Path, serve: Callable[[Script], Server],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Settings that the command line sets later than others are checked without them."""
    server, output = serve(played_by(tiny_model_dir, "vLLM")), tmp_path / "answers.jsonl"
    words = [f"endpoint={server.url}", "endpoint_model=m", f"logprobs={TOP}", f"prompts={prompts}"]
    words += [f"output={output}", f"max_new_tokens={LONGEST}", "keep_truncated=true"]
    assert start(monkeypatch, *words, command="regenerate") != 0
    assert f"logprobs={TOP} needs model=" in capsys.readouterr().err and not output.exists()
    assert start(monkeypatch, *words[1:], f"model={tiny_model_dir}", command="regenerate") != 0
    assert "logprobs must be 0 without endpoint=" in capsys.readouterr().err
    assert start(monkeypatch, *words, f"model={tiny_model_dir}", command="regenerate") == 0
    assert "top" in json.loads(output.read_text().splitlines()[0])["tokens"]


def test_a_stored_row_stands_before_its_token(tmp_path: Path) -> None:
    """A row at its token's own place teaches to guess the token that is there already."""
    labels = np.array([IGNORE, IGNORE, 7, 8, IGNORE, 9], dtype=np.int32)
    chance = np.random.default_rng(0)
    ids = chance.permuted(np.tile(np.arange(20), (3, 1)), axis=1)[:, :4].astype(np.int32)
    log_probs = np.log(np.sort(chance.dirichlet(np.ones(9), 3)[:, :4])[:, ::-1]).astype(np.float32)
    document = Encoded("a", np.arange(6, dtype=np.int32), labels, (ids, log_probs))
    digest = check_told([document], 3, 20)
    place = tmp_path, [document], {"told": digest}
    plan = plan_top_logits(*place, vocab_size=20, top_k=3)
    write_cache(plan, [document], None, (1, 6))
    found = TeacherCache(plan)[0]
    for row, at in enumerate((1, 2, 4)):
        assert np.array_equal(found["teacher_ids"][at], ids[row, :3])
        assert np.array_equal(found["teacher_log_probs"][at], log_probs[row, :3])
    assert torch.allclose(found["teacher_log_probs"][[0, 3, 5]].exp(), torch.tensor(0.25))
    for told, problem in (
        ([document, replace(document, top=None)], "1 of 2 training records bring no"),
        ([document], "more than the 4 tokens"),
        ([document], "and 5 are compared"),
    ):
        size = 5 if "compared" in problem else 20
        with pytest.raises(ConfigError, match=problem):
            check_told(told, 5 if "more" in problem else 3, size)
    assert check_told([replace(document, top=None)], 3, 20) == ""


def test_an_end_that_the_template_does_not_keep_has_no_row() -> None:
    """Rows of such an end would shift those of all later answers by one token."""
    tokenizer = build_byte_tokenizer()
    other, eos = 200, int(tokenizer.eos_token_id)
    turns = TurnEncoder(tokenizer, [other, eos])
    ask, old = {"role": "user", "content": "a"}, {"role": "assistant", "content": "?"}
    talk = dialogue({"id": "a", "kind": "chat", "messages": [ask, old, ask]})
    for text, end in (("xy", other), ("z", eos)):
        ids = [*text.encode(), end]
        likely = [(token, [token, 1], [-0.5, -1.5 - token / 100]) for token in ids]
        talk.answers.append(Answer(text, "stop", len(ids), likely))
    found = retold(talk, turns)
    learned = [found["ids"][t] for start, stop in found["answers"] for t in range(start, stop)]
    assert learned == [*b"xy", *b"z", eos]
    told, log_probs = unpacked_top(found["top"], len(learned))
    assert told[:, 0].tolist() == learned
    assert np.allclose(log_probs[:, 1], [-1.5 - token / 100 for token in learned])
