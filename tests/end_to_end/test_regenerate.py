"""``python -m specheads.regenerate``: a base model's own answers, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads import regenerate
from specheads.attention.tree import default_tree
from specheads.config import AdapterConfig, ConfigError, RegenerateConfig, RunError
from specheads.data.chat import Documents, Encoder, encode_records
from specheads.data.load import read_jsonl
from specheads.decoding.loop import plain_decode
from specheads.losses.cross_entropy import IGNORE
from specheads.models.adapters import add_adapter
from specheads.models.base import load_base_model, load_tokenizer
from specheads.models.checkpoint import origin, save_export
from specheads.models.heads import MedusaHeads
from specheads.models.names import base_digest
from specheads.regeneration import engine
from specheads.regeneration.answers import record_seed
from specheads.verification.sampling import Sampler
from tests.conftest import build_byte_tokenizer, build_tiny_llama
from tests.processes import Process
from tests.toys import save_talker

EOS = 258


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model whose answers end, most within 40 tokens."""
    return save_talker(tmp_path_factory.mktemp("talker") / "base")


@pytest.fixture
def export(talker: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes an export: of the model itself, or tuned: base or adapter."""

    def make(tuned: str = "") -> Path:
        base = load_base_model(str(talker))
        if tuned == "adapter":
            add_adapter(base, AdapterConfig(kind="lora", rank=2))
        output = base.get_output_embeddings().weight
        heads = MedusaHeads(2, 1, output.shape[1], output.shape[0])
        with torch.no_grad():
            heads.init_from_output(output)
        path = tmp_path / f"export{tuned}"
        info = origin(str(talker), {"recipe": "none", "steps": 0})
        tokenizer, tree = load_tokenizer(str(talker)), default_tree(2, 6)
        save_export(path, heads, tokenizer, tree, info, tuned_base=base if tuned else None)
        return path

    return make


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Return a .jsonl of dialogues of one to three turns, and pairs."""
    path = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = []
    for i in range(20):
        user, old = {"role": "user", "content": "é" * (i % 5) + f"ask {i}"}, "old answer"
        turn = [user, {"role": "assistant", "content": old}]
        messages = [{"role": "system", "content": "s"}] * (i % 2) + turn * (1 + i % 3)
        lines.append({"id": f"chat/{i}", "kind": f"kind{i % 2}", "messages": messages})
        if i % 4 == 0:
            lines.append({"id": f"pair/{i}", "prompt": f"def f{i}(x):\n", "completion": old})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(output: Path, **settings: Any) -> dict[str, dict[str, Any]]:
    """Regenerate in this process; return the lines of the output by id."""
    given: dict[str, Any] = {
        "max_new_tokens": 40, "temperature": 1.0, "dtype": "float32", "threads": 1, "seed": 5,
    }  # fmt: skip
    regenerate.run(RegenerateConfig(output=str(output), **(given | settings)))
    return lines_of(output)


def lines_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return the objects of a .jsonl by their id, each id once."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    found = {line["id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def bad_of(path: Path) -> dict[str, str]:
    """Return id -> reason of the quarantine."""
    bad = path.with_name(path.name + ".bad.jsonl")
    return {k: v["reason"] for k, v in lines_of(bad).items()} if bad.exists() else {}


# A process that has imported all and forks one that regenerates, for each line of a pipe.
# The line's first word is after how many answers it waits to be killed, however long that takes.
FORKS = """
import json, os, sys, time
import specheads.regeneration.engine
from specheads import regenerate
from specheads.regeneration.answers import AnswerFile
append, left = AnswerFile.append, 0
def waiting(self, *args):
    global left
    append(self, *args)
    if any(map(len, args)):
        left -= 1
        if not left:
            time.sleep(600)
AnswerFile.append = waiting
print("ready", flush=True)
for number, line in enumerate(open(sys.argv[1])):
    pid = os.fork()
    if not pid:
        left, *arguments = json.loads(line)
        sys.argv = ["regenerate", *arguments]
        try:
            regenerate.main()
        except SystemExit as stopped:
            os._exit(stopped.code or 0)
        os._exit(0)
    print(number, "runs as", pid, flush=True)
    status = os.waitpid(pid, 0)[1]
    print(number, "ended with", os.waitstatus_to_exitcode(status), flush=True)
"""


def test_killed_at_any_moment(talker: Path, prompts: Path, tmp_path: Path) -> None:
    """A run of days is killed sooner or later: nothing may be lost, doubled or answered otherwise.

    The first stop is Ctrl-C, which has to say how to go on; the others are kills.
    """
    settings = {"model": str(talker), "prompts": str(prompts)}
    whole = run(tmp_path / "whole.jsonl", **settings, batch_size=4)
    output = tmp_path / "new folder" / "out.jsonl"
    arguments = [
        f"model={talker}", f"prompts={prompts}", f"output={output}", "max_new_tokens=40",
        "temperature=1.0", "dtype=float32", "threads=1", "seed=5", "batch_size=1",
    ]  # fmt: skip
    pipe, bad = tmp_path / "pipe", output.with_name(output.name + ".bad.jsonl")
    os.mkfifo(pipe)
    forks = Process("-c", FORKS, str(pipe), cwd=tmp_path)
    forks.wait_for("^ready")
    asked = pipe.open("w")
    codes: list[int] = []
    chance = random.Random(7)
    try:
        while 0 not in codes and len(codes) < 40:
            before = _size(output, bad)
            asked.write(json.dumps([3 if len(codes) < 7 else 0, *arguments]) + "\n")
            asked.flush()
            pid = int(forks.wait_for(rf"^{len(codes)} runs as (\d+)$")[1])
            while _size(output, bad) == before and len(codes) < 7:
                time.sleep(0.001)
            if len(codes) < 7:
                time.sleep(chance.uniform(0, 0.02))
                os.kill(pid, signal.SIGKILL if codes else signal.SIGINT)
            codes.append(int(forks.wait_for(rf"^{len(codes)} ended with (-?\d+)$")[1]))
            if len(codes) < 8:  # what a kill in the middle of a write leaves
                with output.open("ab") as file:
                    file.write(b'{"id": "chat/0", "ki'[: chance.randrange(20)])
    finally:
        asked.close()
        forks.wait()
    text = forks.stderr
    kills = codes[1:-1]
    assert codes[0] == 75 and codes[-1] == 0 and set(kills) == {-signal.SIGKILL}, (codes, text)
    assert len(kills) == 6
    assert "specheads: interrupted: " in text and "the same command goes on" in text
    assert lines_of(output) == whole
    assert bad_of(output) == bad_of(tmp_path / "whole.jsonl")
    assert len(whole) > 10 and len(whole) + len(bad_of(output)) == 25
    assert f"{len(whole)} in all" in text and "0 left" in text


def _size(*paths: Path) -> int:
    return sum(path.stat().st_size for path in paths if path.exists())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neighbours_and_heads_change_nothing(
    talker: Path,
    export: Callable[..., Path],
    prompts: Path,
    tmp_path: Path,
    temperature: float,
) -> None:
    """An answer that depends on its batch could not be made again after a restart."""
    settings: dict[str, Any] = {
        "model": str(talker), "prompts": str(prompts), "temperature": temperature,
        "keep_truncated": True, "max_new_tokens": 16,
    }  # fmt: skip
    alone = run(tmp_path / "1.jsonl", **settings, batch_size=1)
    bad = bad_of(tmp_path / "1.jsonl")
    assert len(alone) > 15 and len(alone) + len(bad) == 25
    for name, more in (("8", {"batch_size": 8}), ("heads", {"checkpoint": str(export())})):
        assert run(tmp_path / f"{name}.jsonl", **settings, **more) == alone
        assert bad_of(tmp_path / f"{name}.jsonl") == bad
    if temperature:  # and yet each record draws for itself
        assert len({str(answer_of(line)) for line in alone.values()}) > len(alone) - 3
        other = run(tmp_path / "o.jsonl", **settings | {"seed": 6})
        same = [name for name in alone.keys() & other.keys() if _same(alone[name], other[name])]
        assert len(same) < 3


def answer_of(line: dict[str, Any]) -> list[int]:
    """Return the ids of a record's first answer."""
    ids: list[int] = line["tokens"]["ids"]
    return ids[slice(*line["tokens"]["answers"][0])]


def _same(line: dict[str, Any], other: dict[str, Any]) -> bool:
    return answer_of(line) == answer_of(other)


def test_the_very_ids_are_stored(talker: Path, prompts: Path, tmp_path: Path) -> None:
    """Ids from tokenizing an answer's text again need not be those that the model said.

    The reference decodes each answer alone, given the stored ids before it.
    """
    output = tmp_path / "out.jsonl"
    lines = run(output, model=str(talker), prompts=str(prompts))
    base, tokenizer = load_base_model(str(talker)), load_tokenizer(str(talker))
    encoder = Encoder(tokenizer)
    inputs = {record["id"]: record for record in read_jsonl(prompts)}
    assert max(len(line["tokens"]["answers"]) for line in lines.values()) >= 2
    for name, line in lines.items():
        ids, spans = line["tokens"]["ids"], line["tokens"]["answers"]
        texts = [m["content"] for m in line.get("messages", []) if m["role"] == "assistant"]
        texts = texts or [line["completion"]]
        for (start, stop), text in zip(spans, texts, strict=True):
            result = plain_decode(
                base,
                torch.tensor([ids[:start]]),
                max_new_tokens=40,
                sampler=Sampler(1.0, seed=record_seed(5, name)),
                eos_token_ids=[EOS],
            )
            assert result.new_tokens == ids[start:stop] and ids[stop - 1] == EOS
            assert tokenizer.decode(ids[start : stop - 1], skip_special_tokens=True) == text
        assert ids[: spans[0][0]] == encoder.prompt(_first_turn(inputs[name]))
        made = line["generation"]
        assert made["num_tokens"] == [stop - start for start, stop in spans]
        assert made["finish_reason"] == ["stop"] * len(spans)
        assert made["digest"] == base_digest(str(talker)) and made["model"] == str(talker)
        assert line["kind"] == inputs[name]["kind"] and "old answer" not in json.dumps(line)
    # and training takes them as they are
    records = read_jsonl(output)
    encoded = encode_records(records, Documents(tokenizer, seq_len=512))
    assert encoded.counts["retokenized"] == encoded.counts["unlabelled"] == 0
    for document in encoded.documents:
        tokens = lines[document.id]["tokens"]
        assert document.input_ids.tolist() == tokens["ids"]
        learned = [t for span in tokens["answers"] for t in range(*span)]
        assert [t for t, x in enumerate(document.labels) if x != IGNORE] == learned


def _first_turn(record: dict[str, Any]) -> dict[str, Any]:
    if "prompt" in record:
        return record
    until = next(i for i, m in enumerate(record["messages"]) if m["role"] == "assistant")
    return record | {"messages": record["messages"][: until + 1]}


def test_what_did_not_end_is_quarantined(
    talker: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Heads that learn from cut answers guess on where the base model stops."""
    settings = {"model": str(talker), "prompts": str(prompts), "max_new_tokens": 10}
    lines = run(tmp_path / "a.jsonl", **settings)
    bad = bad_of(tmp_path / "a.jsonl")
    assert len(lines) + len(bad) == 25 and len(lines) >= 5 and "truncated" in bad.values()
    said = capsys.readouterr().err
    cut_off = list(bad.values()).count("truncated")
    assert f"{len(lines)} done now" in said
    assert f"{cut_off} of 25 records reached max_new_tokens=10" in said
    assert "max_new_tokens=40 with another output=" in said and "keep_truncated=true" in said
    run(tmp_path / "a.jsonl", **settings)  # once is enough
    said = capsys.readouterr().err
    assert f"{len(lines)} done before" in said and "0 done now" in said
    assert f"truncated {cut_off}" in said and f"{cut_off} of 25 records reached" in said
    kept = run(tmp_path / "b.jsonl", **settings, keep_truncated=True)
    assert {name: kept[name]["tokens"] for name in lines} == {
        name: line["tokens"] for name, line in lines.items()
    }
    assert "reached max_new_tokens" not in capsys.readouterr().err
    with pytest.raises(RunError, match=r"no record .* \(truncated 2\d.*; 2\d of 25 .*=4 with"):
        run(tmp_path / "c.jsonl", **settings | {"max_new_tokens": 1})
    cut = [line for line in kept.values() if "length" in line["generation"]["finish_reason"]]
    assert len(cut) >= 10
    for line in cut:
        for reason, span in zip(
            line["generation"]["finish_reason"], line["tokens"]["answers"], strict=True
        ):
            assert (line["tokens"]["ids"][span[1] - 1] == EOS) == (reason == "stop")


def test_the_context_is_a_limit(talker: Path, tmp_path: Path) -> None:
    """Positions behind the context are noise, and one long prompt must not end the run."""
    path = tmp_path / "long.jsonl"
    sizes = {"over": 600, "full": 505, "short": 5}
    records = [{"id": k, "prompt": "x" * n, "completion": ""} for k, n in sizes.items()]
    records.append({"id": "tool", "messages": [{"role": "tool", "content": "x"}]})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"model": str(talker), "prompts": str(path), "keep_truncated": True}
    lines = run(tmp_path / "out.jsonl", **settings)
    assert bad_of(tmp_path / "out.jsonl") == {"over": "too_long", "tool": "role"}
    assert lines["full"]["generation"]["num_tokens"][0] <= 7
    assert lines["short"] == run(tmp_path / "1.jsonl", **settings, batch_size=1)["short"]


def test_a_limit_is_a_fair_sample_that_grows(talker: Path, prompts: Path, tmp_path: Path) -> None:
    """The first lines of a file are often of one kind; raising the limit must not start anew."""
    output = tmp_path / "out.jsonl"

    def settled(limit: int) -> set[str]:
        lines = run(output, model=str(talker), prompts=str(prompts), limit=limit)
        return lines.keys() | bad_of(output).keys()

    few, more = settled(6), settled(9)
    assert len(few) == 6 and few != {record["id"] for record in read_jsonl(prompts)[:6]}
    assert len(more) == 9 and few < more


@pytest.mark.parametrize("kind", ["base", "adapter"])
def test_a_tuned_base_is_asked_for_by_name(
    talker: Path,
    export: Callable[..., Path],
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    """A tuned base answers otherwise than the original for which heads are then trained."""
    tuned, output = export(tuned=kind), tmp_path / "t.jsonl"
    settings: dict[str, Any] = {
        "prompts": str(prompts), "checkpoint": str(tuned), "limit": 4, "keep_truncated": True,
    }  # fmt: skip
    for model in ("", str(talker)):
        with pytest.raises(ConfigError, match=rf"brings a tuned base, .* model=.*/{kind}"):
            run(output, **settings, model=model)
    lines = run(output, **settings, model=str(tuned / kind))
    assert "those of the tuned base" in capsys.readouterr().err
    assert lines and all(line["generation"]["tuned"] for line in lines.values())
    with pytest.raises(ConfigError, match="tuned .True there, False here"):
        run(output, prompts=str(prompts), model=str(talker))


def test_whose_answers_these_are(
    talker: Path, export: Callable[..., Path], prompts: Path, tmp_path: Path
) -> None:
    """A file half of one model's answers and half of another's would look like any other."""
    settings = {"prompts": str(prompts), "limit": 2}
    other = _other_model(tmp_path)
    with pytest.raises(ConfigError, match=r"was trained on .*, digest .*; model=.* has "):
        run(tmp_path / "u.jsonl", checkpoint=str(export()), model=str(other), **settings)
    run(tmp_path / "v.jsonl", model=str(talker), **settings)
    with pytest.raises(ConfigError, match=r"model_digest .\w{12} there, \w{12} here"):
        run(tmp_path / "v.jsonl", model=str(other), **settings)


def _other_model(tmp_path: Path) -> Path:
    path = tmp_path / "other"
    build_tiny_llama(seed=9, vocab_size=262).save_pretrained(path)
    build_byte_tokenizer().save_pretrained(path)
    return path


def test_a_server_answers(
    talker: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a server said must be stored as training would read it, and continued like our own."""
    monkeypatch.delenv("http_proxy", raising=False)
    busy = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            if self.path.endswith("models"):
                return self.reply(200, {"data": [{"id": "served"}]})
            if not busy.is_set():
                busy.set()
                return self.reply(429, {})
            text = f"said {body['seed']}"
            reason = "length" if "ask 3" in json.dumps(body) else "stop"
            choice = {"text": text, "message": {"content": text}, "finish_reason": reason}
            return self.reply(200, {"choices": [choice]})

        do_GET = do_POST  # noqa: N815

        def reply(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    settings = {"endpoint": url, "prompts": str(prompts), "concurrency": 4, "retries": 2}
    try:
        run(tmp_path / "out.jsonl", model=str(talker), limit=10, **settings)
        lines = run(tmp_path / "out.jsonl", model=str(talker), **settings)
        with pytest.raises(ConfigError, match="model .served there, other here"):
            run(tmp_path / "out.jsonl", model=str(talker), endpoint_model="other", **settings)
        bare = run(tmp_path / "bare.jsonl", limit=3, endpoint_model="served", **settings)
    finally:
        server.shutdown()
        server.server_close()
    assert bad_of(tmp_path / "out.jsonl") == {"chat/3": "truncated"} and len(lines) == 24
    made = lines["chat/1"]["generation"]
    assert made["model"] == "served" and made["endpoint"] == url and made["seed"] == 5
    assert lines["chat/1"]["messages"][-1]["content"] == f"said {record_seed(5, 'chat/1')}"
    records = read_jsonl(tmp_path / "out.jsonl")
    tokenizer = load_tokenizer(str(talker))
    stored = encode_records(records, Documents(tokenizer, seq_len=512))
    assert stored.counts["retokenized"] == 0
    without = [{k: v for k, v in r.items() if k != "tokens"} for r in records]
    read = encode_records(without, Documents(tokenizer, seq_len=512))
    for a, b in zip(stored.documents, read.documents, strict=True):
        assert (a.input_ids == b.input_ids).all() and (a.labels == b.labels).all()
    assert all("tokens" not in line for line in bare.values())
    with pytest.raises(RunError, match="/models: .*refused"):
        run(tmp_path / "out.jsonl", **settings | {"retries": 0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["output=o.jsonl", "temperature=-1"], "temperature must be at least 0"),
        (["output=o.jsonl", "max_new_tokns=3"], "did you mean max_new_tokens"),
        (["limit=3"], "no value given for output"),
        (["output=in.jsonl", "prompts=in.jsonl"], "output=in.jsonl is the input itself"),
        (["output=o.jsonl", "prompts=none.jsonl"], "cannot read none.jsonl"),
        (["output=o.jsonl", "prompts=text.jsonl"], "record text.jsonl:1 holds text"),
        (["output=o.jsonl", "prompts=in.jsonl", "model=./none"], "no such folder"),
        (["output=mine.jsonl", "prompts=in.jsonl"], "no mine.jsonl.json beside it"),
        (["output=o.jsonl", "endpoint=localhost"], "endpoint must be like http"),
        (["output=o.jsonl", "endpoint=http://x", "checkpoint=y"], "left out with checkpoint"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A mistake that shows after minutes of loading, or as a traceback, costs an afternoon."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "x", "completion": "y"}\n')
    (tmp_path / "text.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "mine.jsonl").write_text('{"text": "x"}\n')
    monkeypatch.setattr(sys, "argv", ["regenerate", *arguments])
    monkeypatch.setattr(engine, "load_engine", None)
    with pytest.raises(SystemExit) as stopped:
        regenerate.main()
    said = capsys.readouterr().err.strip().splitlines()
    assert stopped.value.code == 2 and len(said) == 1 and message in said[0]
    assert not (tmp_path / "o.jsonl").exists()
