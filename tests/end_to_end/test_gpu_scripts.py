"""The programs for a GPU, on a CPU as far as that goes; with ``-m gpu`` their checks on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specheads.decoding import accept
from specheads.measure.bench import Contest
from specheads.measure.calibrate import Search, calibrate
from specheads.measure.clock import Prompt
from specheads.measure.hits import Texts
from specheads.models.output import output_layer
from tests import processes
from tests.elsewhere import elsewhere
from tests.script_modules import load_script

gpu_check = load_script("gpu_check")
bench_gpu = load_script("bench_gpu")
harness = load_script("harness")


def test_checks_pass_and_say_what_was_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program meets a GPU for minutes, months after its last change: it must just run."""
    names = ["identity/llama", "golden", "dynamic trees", "doors", "kv commit", "training"]
    names += ["compile", "several devices"]
    out = tmp_path / "new" / "check.json"
    assert gpu_check.main(["--device", "cpu", "--out", str(out), "--only", *names]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "6 ok, 0 failed, 2 not run"
    checks = json.loads(out.read_text())["checks"]
    assert [check["check"] for check in checks] == names
    assert all(check["detail"] for check in checks)


def test_checks_need_torch_and_transformers_only() -> None:
    """A lent machine has no Hydra, and nothing can be installed there."""
    code = (
        "import runpy, sys\n"
        "for name in ('hydra', 'omegaconf', 'datasets', 'deepspeed', 'bitsandbytes', 'wandb'):\n"
        "    sys.modules[name] = None\n"
        "sys.path.insert(0, 'scripts')\n"
        "sys.argv[1:] = ['--device', 'cpu', '--only', 'golden', '4 bit']\n"
        "runpy.run_path('scripts/gpu_check.py', run_name='__main__')"
    )
    done = processes.run("-c", code)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "bitsandbytes is missing" in done.stdout and "1 ok, 0 failed" in done.stdout


def test_failed_check_is_said_and_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check that fails behind exit code 0 is taken for one that passed."""

    def broken(device: torch.device) -> str:
        raise RuntimeError(f"nothing works on {device}")

    monkeypatch.setitem(gpu_check.CHECKS, "memory", broken)
    assert gpu_check.main(["--device", "cpu", "--only", "memory", "kv commit"]) == 1
    said = capsys.readouterr().out
    assert "RuntimeError: nothing works on cpu" in said and "1 ok, 1 failed, 0 not run" in said


@pytest.mark.parametrize("name", ["identity/llama", "doors", "kv commit"])
def test_checks_pass_on_a_device_of_its_own(name: str) -> None:
    """Trees that were cut for a text's end lay on the CPU, and no GPU decoded a static tree."""
    with elsewhere() as device:
        row = gpu_check.run_check(name, device)
    assert row["status"] == "ok", row


def test_chains_are_decoded_on_a_device_of_its_own() -> None:
    """Where a model takes no tree, its first chain is cut from one."""
    with elsewhere() as device:
        assert gpu_check.identity("bloom", device)


def test_trees_are_chosen_and_clocked_on_a_device_of_its_own() -> None:
    """What only measures meets a GPU as late as the rest."""
    with elsewhere() as device:
        export = gpu_check.golden_export(device)
        asked = [prompt.to(device) for prompt in gpu_check.PROMPTS]
        found = calibrate(
            export.base,
            export.heads,
            output_layer(export.base),
            Texts(asked, max_new_tokens=8),
            Search(max_nodes=6, repeats=1),
        )
        contest = Contest.of(export, 8)
        methods = [contest.ours(), *contest.of_trees(export.heads, [found.tree])]
        prompts = [Prompt(str(i), "", ids) for i, ids in enumerate(asked)]
        rows = harness.measure_rows(export.base, methods, prompts, 0.0, repeats=1)
    assert [(row["compared"], row["identical"]) for row in rows][1] == (3, 3)


def test_identity_check_notices_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that cannot fail says ok on every machine."""
    follow = accept.rules.walk_on_host

    def too_generous(tokens: list[list[int]], *more: object) -> list[list[int]]:
        paths = follow(tokens, *more)  # type: ignore[arg-type]
        # takes the first guess, right or wrong
        return [
            [0, 1] if nodes == [0] and len(row) > 1 else nodes
            for nodes, row in zip(paths, tokens, strict=True)
        ]

    monkeypatch.setattr(accept.rules, "walk_on_host", too_generous)
    row = gpu_check.run_check("identity/llama", torch.device("cpu"))
    assert row["status"] == "failed", row


def test_bench_measures_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As for the checks: a typo found on the lent machine costs its minutes."""
    out = tmp_path / "bench.json"
    arguments = ["--shape", "tiny", "--device", "cpu", "--modes", "eager", "expanded"]
    arguments += [
        "--dtype",
        "float32",
        "--nodes",
        "1",
        "16",
        "--context",
        "20",
        "--repeats",
        "2",
        "--warmup",
        "1",
    ]
    assert bench_gpu.main([*arguments, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    rows = {(row["mode"], row["nodes"]): row for row in report["rows"] if row["part"] == "base"}
    assert rows["eager", 16]["vs_plain"] > 0 and rows["eager", 16]["vs_floor"] > 0
    assert set(rows["eager", 16]["with_heads_vs_plain"]) == {"shared", "own"}
    assert rows["expanded", 16]["difference"] < 1e-5
    assert {row["lm_head"] for row in report["rows"] if row["part"] == "heads"} == {"shared", "own"}
    assert "mode eager, nodes 16" in capsys.readouterr().out


def test_bench_trains_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training is tried once on a lent machine: what is missing costs its own row only."""
    monkeypatch.setattr(bench_gpu, "ENGINES", {"torch": {}, "no_such_package": {}})
    out = tmp_path / "bench.json"
    arguments = ["--device", "cpu", "--dtype", "float32", "--parts", "medusa1_8b"]
    arguments += ["--train-rows", "2", "--train-seq-len", "16", "--train-steps", "2"]
    assert bench_gpu.main([*arguments, "--shape", "tiny", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["engine"], row["lm_head"]) for row in rows[:2]] == [
        ("torch", "own"),
        ("torch", "shared"),
    ]
    for row in rows[:2]:
        assert row["tokens_per_second"] == pytest.approx(32 / row["ms"] * 1e3)
        assert row["flops_per_second"] > 0 and row["mfu"] is None
        assert row["predicted_memory"] > 0
    assert rows[2]["status"] == "not run" and "no_such_package" in rows[2]["detail"]
    assert bench_gpu.main([*arguments, "--shape", "8b"]) == 0
    assert "status not run, detail needs a CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize("shape", ["1b", "8b"])
def test_bytes_of_the_floor(shape: str) -> None:
    """An embedding counted as read makes the floor too high and the figures too good."""
    with torch.device("meta"):
        model = bench_gpu.build(shape, "bfloat16", torch.device("meta"))
    config = model.config
    d, width = config.hidden_size, config.num_key_value_heads * config.head_dim
    layer = 2 * d * d + 2 * d * width + 3 * d * config.intermediate_size + 2 * d
    expected = config.num_hidden_layers * layer + d + config.vocab_size * d
    assert bench_gpu.weight_bytes(model) == 2 * expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(gpu_check.CHECKS))
def test_on_a_gpu(name: str) -> None:
    """What holds on a CPU need not hold for a GPU's kernels."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    row = gpu_check.run_check(name, torch.device("cuda"))
    if row["status"] == "not run":
        pytest.skip(row["detail"])
    assert row["status"] == "ok", row["detail"]
