"""lm-eval's interface over our decoder, with a stand-in for lm-eval."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors

from specheads.config import ConfigError
from specheads.decoding.loop import plain_decode
from specheads.measure import lm_eval
from specheads.measure.lm_eval import rolling_windows
from specheads.verification.sampling import Sampler
from tests import fake_lm_eval
from tests.fake_lm_eval import Instance

EOS, BOS = 258, 257


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


@torch.no_grad()
def slow_score(model: Any, ids: list[int], num_after: int) -> tuple[float, bool]:
    """Score the last tokens of a text, each from its prefix alone."""
    total, greedy = 0.0, True
    for place in range(len(ids) - num_after, len(ids)):
        logits = model(input_ids=torch.tensor([ids[:place]])).logits[0, -1]
        total += float(logits.log_softmax(0)[ids[place]])
        greedy &= int(logits.argmax()) == ids[place]
    return total, greedy


def test_likelihoods_are_the_base_models(lm: Any) -> None:
    """A context that is cut or begun otherwise than the base's own would be scored as another."""
    base, bytes_of = lm.base, lambda text: list(text.encode())
    pairs = [("def f(x):", "\n  return"), ("a = ", "1"), ("", "import os"), ("  ", "x")]
    found = lm.loglikelihood(requests(*pairs))
    expected = [
        (bytes_of("def f(x):"), bytes_of("\n  return")),
        (bytes_of("a ="), bytes_of(" 1")),  # the space goes with the word behind it
        ([BOS], bytes_of("import os")),
        ([BOS], bytes_of("  x")),
    ]
    for (score, greedy), (before, after) in zip(found, expected, strict=True):
        assert (score, greedy) == (
            pytest.approx(slow_score(base, before + after, len(after))[0], rel=1e-4),
            slow_score(base, before + after, len(after))[1],
        )
    long = "".join(chr(33 + i * i % 89) for i in range(700))  # every cut reads another text
    (score, _), *_ = lm.loglikelihood(requests((long, "yz")))
    assert score == pytest.approx(slow_score(base, bytes_of(long + "yz")[-513:], 2)[0], rel=1e-5)
    with pytest.raises(ValueError, match="1 to 512 tokens, got 0"):
        lm.loglikelihood(requests(("a", "")))
    assert [each[:2] for each in lm.cache_hook.kept[:4]] == [("loglikelihood", p) for p in pairs]


def test_greedy_continuations_are_said_to_be(lm: Any) -> None:
    """is_greedy decides exact-match scores of whole tasks."""
    with torch.no_grad():  # so that what is likeliest is text
        weight = lm.base.get_output_embeddings().weight
        weight[128:] = 0
    ids = torch.tensor([list(b"a b a b")])
    best = plain_decode(lm.base, ids, max_new_tokens=4).new_tokens
    text = bytes(best).decode()
    wrong = text[:-1] + chr((best[-1] + 1) % 128)
    found = lm.loglikelihood(requests(("a b a b", text), ("a b a b", wrong)))
    assert [greedy for _, greedy in found] == [True, False]


def test_rolling_windows_predict_every_token_once(lm: Any) -> None:
    """A token that two windows predict counts twice in the perplexity of a long document."""
    windows = list(rolling_windows(list(range(10)), -1, 4))  # lm-eval's own example
    assert windows == [([-1], [0, 1, 2, 3]), ([3], [4, 5, 6, 7]), ([5, 6, 7], [8, 9])]
    assert list(rolling_windows([], -1, 4)) == []
    base, text = lm.base, "def f(x): return x\n"
    (score,) = lm.loglikelihood_rolling(requests((text,)))
    ids = [BOS, *text.encode()]
    assert score == pytest.approx(slow_score(base, ids, len(text))[0], rel=1e-4)
    assert lm.loglikelihood_rolling(requests(("",))) == [0]
    long = lm.loglikelihood_rolling(requests(("x" * 600,)))[0]
    whole = [BOS, *b"x" * 600]
    parts = slow_score(base, whole[:513], 2)[0], slow_score(base, whole[601 - 513 :], 2)[0]
    assert long < sum(parts) < 0


def test_generation_is_plain_decodings(lm: Any) -> None:
    """A harness whose texts depend on the drafter measures the drafter."""
    contexts = ["def f(x):\n", "a b a b a b", "print(", "1, 2, 3,", "x"]
    asked = [(text, {"until": [], "max_gen_toks": 12, "do_sample": False}) for text in contexts]
    texts = lm.generate_until(requests(*asked))
    for context, text in zip(contexts, texts, strict=True):
        ids = torch.tensor([list(context.encode())])
        new = plain_decode(lm.base, ids, max_new_tokens=12, eos_token_ids=(EOS,)).new_tokens
        assert text == lm.tokenizer.decode(new, skip_special_tokens=True)
    info = lm.get_model_info()
    assert info["accept_length"] > 1 and info["num_steps"] < 12 * len(contexts)
    sampled = [(text, {"temperature": 0.8, "max_gen_toks": 9}) for text in contexts]
    drawn = lm.generate_until(requests(*sampled))
    for n, (context, text) in enumerate(zip(contexts, drawn, strict=True)):
        new = plain_decode(
            lm.base,
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
    with pytest.raises(
        ConfigError, match="asks for 512 new tokens, but the model's context is 512"
    ):
        lm.generate_until(requests((context, {"max_gen_toks": 512})))
    with pytest.raises(ConfigError, match="asks generation for num_beams"):
        lm.generate_until(requests((context, {"num_beams": 4})))


def test_chat_templates(lm: Any) -> None:
    """Few-shot examples rendered by another template are another task; two bos tokens, too."""
    said = [{"role": "user", "content": "one"}]
    text = lm.apply_chat_template(said)
    assert text == "<bos><|user|>one<|assistant|>"
    assert lm.encode("one") == [*b"one"]
    template = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    lm.tokenizer.backend_tokenizer.post_processor = template  # as Llama's does
    assert lm.encode("one") == [BOS, *b"one"]
    assert lm.encode(text)[:3] == [BOS, 260, ord("o")]
    begun = [*said, {"role": "assistant", "content": "tw"}]
    assert lm.apply_chat_template(begun, add_generation_prompt=False).endswith("tw")
    assert lm.chat_template(False) is None and "generation" in lm.chat_template(True)
    assert "/" not in lm.tokenizer_name


def test_arguments_are_settings(registry: dict[str, type], tiny_export: Path) -> None:
    """A mistyped rule would be scored as if it were the one that was meant."""
    cls: Any = lm_eval.register()
    assert registry == {"specheads": cls} and lm_eval.register() is cls
    assert lm_eval.SpecheadsLM is cls, "lm-eval's own table names module:class"
    lossy = cls.create_from_arg_string(
        f"checkpoint={tiny_export},drafter=suffix,acceptance=lossy_typical,epsilon=1,compile=false"
    )
    if not torch.cuda.is_available():  # lm-eval's default, whatever the machine has
        assert cls(checkpoint=str(tiny_export), device="cuda:0").base.device.type == "cpu"
    acceptance = lossy.decoder.acceptance
    assert (acceptance.rule, acceptance.epsilon) == ("lossy_typical", 1.0)
    for arguments, message in {
        "": "needs checkpoint=",
        f"checkpoint={tiny_export},aceptance=exact": "unknown key aceptance; there are checkpoint",
        f"checkpoint={tiny_export},epsilon=much": "epsilon must be a float, got 'much'",
        f"checkpoint={tiny_export},compile=3": "compile must be true or false, got 3",
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
    monkeypatch.setitem(sys.modules, "lm_eval.api", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(SystemExit) as stopped:
        lm_eval.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == ("specheads: lm-eval is not installed: pip install lm-eval\n")
