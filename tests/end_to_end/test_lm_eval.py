"""lm-eval's interface over our decoder, with a stand-in for lm-eval."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.config import ConfigError
from specheads.decoding.loop import plain_decode
from specheads.measure import lm_eval
from specheads.verification.sampling import Sampler
from tests import fake_lm_eval
from tests.fake_lm_eval import Instance

EOS = 258


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """Return the registry of a stand-in for lm-eval."""
    return fake_lm_eval.install(monkeypatch)


@pytest.fixture
def lm(registry: dict[str, type], tiny_export: Path) -> Any:
    """Return the model as lm-eval makes it, drafting with heads."""
    lm_eval.register()
    more = {"batch_size": 3, "device": "cpu", "max_batch_size": None}
    cls: Any = registry["specheads"]
    return cls.create_from_arg_string(f"checkpoint={tiny_export},dtype=float32", more)


def requests(*args: tuple[Any, ...]) -> list[Instance]:
    """Return requests of these arguments."""
    return [Instance(each) for each in args]


def test_generation_is_plain_decodings(lm: Any) -> None:
    """A harness whose texts depend on the drafter measures the drafter."""
    contexts = ["def f(x):\n", "a b a b a b", "print(", "1, 2, 3,", "x"]
    asked = [(text, {"until": [], "max_gen_toks": 12, "do_sample": False}) for text in contexts]
    texts = lm.generate_until(requests(*asked))
    for context, text in zip(contexts, texts, strict=True):
        ids = torch.tensor([list(context.encode())])
        new = plain_decode(lm.model, ids, max_new_tokens=12, eos_token_ids=(EOS,)).new_tokens
        assert text == lm.tokenizer.decode(new, skip_special_tokens=True)
    info = lm.get_model_info()
    assert info["accept_length"] > 1 and info["num_steps"] < 12 * len(contexts)
    sampled = [(text, {"temperature": 0.8, "max_gen_toks": 9}) for text in contexts]
    drawn = lm.generate_until(requests(*sampled))
    texts_by_place = sorted(zip(contexts, drawn, strict=True), key=lambda pair: -len(pair[0]))
    for n, (context, text) in enumerate(texts_by_place, start=len(contexts)):  # behind the greedy
        new = plain_decode(
            lm.model,
            torch.tensor([list(context.encode())]),
            max_new_tokens=9,
            eos_token_ids=(EOS,),
            sampler=Sampler(temperature=0.8, seed=n),
        ).new_tokens
        assert text == lm.tokenizer.decode(new, skip_special_tokens=True)


def test_texts_end_before_their_stop_strings(lm: Any) -> None:
    """Scores of tasks that extract an answer depend on where a text ends."""
    context = "a b a b a b"
    (whole,) = lm.generate_until(requests((context, {"max_gen_toks": 16})))
    stop = next(c for c in whole if c.isascii() and c.isprintable())
    both = requests(
        (context, {"until": stop, "max_gen_toks": 16}),
        (context, {"until": ["never", stop, ""], "max_tokens": 16}),
    )
    assert lm.generate_until(both) == [whole[: whole.index(stop)]] * 2
    assert lm.generate_until(requests(("y" * 900, {"max_gen_toks": 4})))[0] is not None
    with pytest.raises(AssertionError, match="requested max tokens to generate .512."):
        lm.generate_until(requests((context, {"max_gen_toks": 512})))
    with pytest.raises(ConfigError, match="asks generation for num_beams"):
        lm.generate_until(requests((context, {"num_beams": 4})))


def test_the_harness_is_given_the_base_model(lm: Any) -> None:
    """Likelihoods are the harness's own: another model or context would score other texts."""
    assert lm.model is lm.decoder.base and lm.tokenizer is lm.decoder.tokenizer
    assert (lm.batch_size, lm.max_length, lm.max_gen_toks) == (3, 512, 256)
    own = type(lm)(checkpoint=lm._about["checkpoint"], max_length=99, max_gen_toks=7)
    assert (own.batch_size, own.max_length, own.max_gen_toks) == (1, 99, 7)


def test_arguments_are_settings(registry: dict[str, type], tiny_export: Path) -> None:
    """A mistyped rule would be scored as if it were the one that was meant."""
    cls: Any = lm_eval.register()
    assert registry == {"specheads": cls} and lm_eval.register() is cls
    assert lm_eval.SpecheadsLM is cls, "lm-eval's own table names module:class"
    lossy = cls.create_from_arg_string(
        f"checkpoint={tiny_export},drafter=suffix,acceptance=lossy_typical,epsilon=1,compile=false"
    )
    if not torch.cuda.is_available():  # lm-eval's default, whatever the machine has
        assert cls(checkpoint=str(tiny_export), device="cuda:0").model.device.type == "cpu"
    acceptance = lossy.decoder.acceptance
    assert (acceptance.rule, acceptance.epsilon) == ("lossy_typical", 1.0)
    for arguments, message in {
        "": "needs checkpoint=",
        f"checkpoint={tiny_export},aceptance=exact": "unknown key aceptance; did you mean",
        f"checkpoint={tiny_export},epsilon=much": "epsilon.*could not be converted to Float",
        f"checkpoint={tiny_export},compile=maybe": "compile.*'maybe' is not a valid bool",
        f"checkpoint={tiny_export},max_length=9999": "max_length is 9999, but .* context is 512",
        "checkpoint=./nowhere": "nowhere",
    }.items():
        with pytest.raises(ConfigError, match=message):
            cls.create_from_arg_string(arguments)


def test_the_command_runs_lm_evals_own(
    registry: dict[str, type],
    tiny_export: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The line in the documentation is all that people will try."""
    arguments = ["--model", "specheads", "--model_args", f"checkpoint={tiny_export}"]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments])
    lm_eval.main()
    assert capsys.readouterr().out.startswith("['")
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "checkpoint=./nowhere"])
    with pytest.raises(SystemExit) as stopped:
        lm_eval.main()
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith("specheads: ") and error.count("\n") == 1


def test_a_missing_lm_eval_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A traceback about an optional package helps nobody."""
    lm_eval.register.cache_clear()
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.models", None)
    with pytest.raises(SystemExit) as stopped:
        lm_eval.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        "specheads: lm-eval is not installed: pip install 'lm-eval[hf]'\n"
    )
