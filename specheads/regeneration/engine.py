"""Answer records with the base model itself, many at a time; no answer knows its neighbours.

Each row draws with a seed made from the run's seed and its record's id. In float32, and in 16 bits
where :class:`~specheads.decoding.stream.Stream` says so, an answer is therefore the same
whatever batch it falls in, in which order, and after how many restarts.

Below is who answers when ``regenerate`` is run: which weights, with which settings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from specheads.config import ConfigError, RegenerateConfig
from specheads.data.schema import Record, RecordError, text_digest
from specheads.decoding.exported import exported_drafter
from specheads.decoding.loop import Settings
from specheads.decoding.result import DecodedRow
from specheads.decoding.stream import Job, Stream
from specheads.drafters.contract import Drafter
from specheads.models import base as bases
from specheads.models.checkpoint import load_export, read_config
from specheads.models.digest import file_sha256, weight_files
from specheads.models.names import base_digest, model_folder, resolve_name
from specheads.models.support import tree_support
from specheads.regeneration.answers import Outcome, Sampling, record_seed
from specheads.regeneration.dialogue import Dialogue, TurnEncoder, check_answer, dialogue
from specheads.system import __version__, hardware
from specheads.system.client import Client
from specheads.verification.sampling import Sampler

POOL = 32  # batches whose records are sorted by length together
_DRAWN = ("temperature", "top_k", "top_p", "seed", "max_new_tokens")


@dataclass(eq=False)
class Engine:
    """The base model as it answers: plainly, or with a drafter, whose answers are the same.

    Attributes:
        base: the base model.
        turns: the encoder that gives the prompts' ids.
        sampling: how answers are drawn.
        generation: JSON about all this, for every answered record.
        drafter: proposes; None decodes one token at a time. Its candidates are to be deterministic:
            the random choices of one that samples belong to rows, not to records.
        batch_size: dialogues that are decoded together; 1 where the model takes no more.
    """

    base: PreTrainedModel
    turns: TurnEncoder
    sampling: Sampling
    generation: dict[str, Any]
    _: KW_ONLY
    drafter: Drafter | None = None
    batch_size: int = 8

    def __post_init__(self) -> None:
        if tree_support(self.base).kind != "tree":
            self.batch_size = 1
        self.context = bases.context_length(self.base) or 1 << 40
        self._outcome = Outcome()  # since the last one that was yielded

    def answer(self, records: Sequence[Record]) -> Iterator[Outcome]:
        """Answer records; yield what became of them, some at a time.

        Args:
            records: an order of which every beginning is a fair sample; neighbours are sorted by
                length within :data:`POOL` batches.
        """
        waiting: deque[Dialogue] = deque()
        pools = self._pools(records)

        def take(num: int) -> list[Job]:
            while len(waiting) < num and (talks := next(pools, None)) is not None:
                waiting.extend(talks)
            return [self._job(waiting.popleft()) for _ in range(min(num, len(waiting)))]

        stream = self.stream(self.sampling)
        for ended in stream.run(take):
            # begun conversations first, or they would pile up until the records are at an end
            waiting.extendleft(self._settle((job.owner, row) for job, row in ended))
            self._outcome.num_tokens += stream.output.num_tokens
            stream.output.num_tokens = 0
            yield self._taken()
        yield self._taken()

    def _taken(self) -> Outcome:
        found, self._outcome = self._outcome, Outcome()
        return found

    def _pools(self, records: Sequence[Record]) -> Iterator[list[Dialogue]]:
        """Yield dialogues by length, some at a time."""
        size = self.batch_size * POOL
        for start in range(0, len(records), size):
            talks: list[Dialogue] = []
            for record in records[start : start + size]:
                with self._outcome.quarantining(record):
                    talks += self._begun(record)
            yield sorted(talks, key=lambda talk: (len(talk.turns), len(talk.ids)))

    def stream(self, sampler: Sampler) -> Stream:
        """Return rows for the base model's own decoding."""
        how = Settings(sampler=sampler, eos_token_ids=self.turns.end_tokens)
        return Stream(self.base, self.drafter, how, batch_size=self.batch_size)

    def _settle(self, ended: Iterable[tuple[Dialogue, DecodedRow]]) -> list[Dialogue]:
        """Give dialogues their next answers; return those in which another one is due."""
        outcome, waiting = self._outcome, list[Dialogue]()
        for talk, row in ended:
            with outcome.quarantining(talk.record):
                self.turns.add(talk, row.new_tokens, ended=row.finished)
                check_answer(talk, self.sampling.keep_truncated)
                if not talk.finished:
                    waiting.append(self._ask(talk))
                    continue
                tokens = {"tokens": self.turns.stored(talk)}
                outcome.answered.append(talk.answered(self.generation) | tokens)
        return waiting

    def _begun(self, record: Record) -> list[Dialogue]:
        """Ask for the first answer that is due; one that was given just so before is taken again.

        So what a user says next in a conversation of the base's own follows the answer it follows.
        """
        talk, made = self._ask(dialogue(record)), record.get("generation")
        if not isinstance(made, dict) or not self.generation.items() <= made.items():
            return [talk]
        tokens, reasons = record.get("tokens", {}), made.get("finish_reason", ())
        for (start, stop), reason in zip(tokens.get("answers", ()), reasons, strict=False):
            ids = tokens["ids"]
            if ids[:start] != talk.ids:
                break
            given = DecodedRow(ids[start:stop], finished=reason == "stop")
            if not self._settle([(talk, given)]):
                return []
        return [talk]

    def _ask(self, talk: Dialogue) -> Dialogue:
        self.turns.ask(talk)
        if (n := len(talk.ids)) >= self.context:
            raise RecordError("too_long", f"a prompt of {n} tokens in a context of {self.context}")
        return talk

    def _job(self, talk: Dialogue) -> Job:
        limit = min(self.sampling.max_new_tokens, self.context - len(talk.ids))
        return Job(talk.ids, limit, record_seed(self.sampling.seed, talk.record["id"]), talk)


@dataclass(frozen=True)
class Answering:
    """Whose answers these are.

    Attributes:
        model: a folder or a name; at an endpoint, the name there.
        digest: the digest of its weights; empty where a server has them.
        tuned: whether it is the tuned base of an export, and not an original.
        quantization: the quantisation of an export's base, as it is recorded there.
    """

    model: str
    digest: str = ""
    tuned: bool = False
    quantization: str | None = None


def who_answers(config: RegenerateConfig, client: Client | None = None) -> Answering:
    """Return whose answers the settings ask for, without loading a model.

    Raises:
        RunError: if the server has to be asked, and does not say.
        ConfigError: if model and checkpoint contradict each other, or the checkpoint's base was
            tuned and ``model`` does not ask for that tuned base by name.
    """
    if client is not None:
        return Answering(config.endpoint_model or client.first_model())
    if not config.checkpoint:
        model = config.model or "tinycode"
        return Answering(model, _digest(model, config))
    info = read_config(config.checkpoint)["base"]
    method = (info.get("quantization") or {}).get("method")
    if not info["tuned"]:
        found = _digest(config.model, config) if config.model else info["digest"]
        if found != info["digest"] and not config.other_base:
            raise ConfigError(
                f"{config.checkpoint} was trained on {info['name']}, digest"
                f" {info['digest'][:12]}; model={config.model} has {found[:12]};"
                " other_base=true takes them all the same"
            )
        return Answering(config.model or info["name"], found, quantization=method)
    tuned = Path(config.checkpoint) / ("adapter" if info.get("adapter") else "base")
    if not config.model or Path(config.model).resolve() != tuned.resolve():
        raise ConfigError(
            f"{config.checkpoint} brings a tuned base, so the answers would not be those of"
            f" {config.model or info['name'] or 'tinycode'}; leave checkpoint out, or ask for the"
            f" tuned base's answers with model={tuned}"
        )
    return Answering(str(tuned), _tuned_digest(tuned, info), tuned=True, quantization=method)


def _tuned_digest(tuned: Path, info: dict[str, Any]) -> str:
    if not info.get("adapter"):
        return base_digest(str(tuned))
    files = sorted(file for file in tuned.iterdir() if file.suffix in (".safetensors", ".json"))
    lines = [info["digest"], *(f"{file.name}\0{file_sha256(file)}" for file in files)]
    return text_digest("\n".join(lines)).hex()


def _digest(model: str, config: RegenerateConfig) -> str:
    revision, trust = config.revision, config.trust_remote_code
    folder = model_folder(model, revision=revision)
    if folder != Path(resolve_name(model)) and not weight_files(folder):
        # a hub model that was never used here: fetch it
        bases.load_base_model(
            model, revision=revision, device="cpu", attn="auto", trust_remote_code=trust
        )
    return base_digest(model, revision=revision)


def weights_of(config: RegenerateConfig, who: Answering) -> dict[str, Any]:
    """Return what there is to know of the weights that make texts; a file is of the same only."""
    if config.endpoint:
        asked = {"logprobs": config.logprobs} if config.logprobs else {}
        return {"model": who.model, "endpoint": True, "tokenizer": config.model} | asked
    dtype = hardware.pick_dtype(config.dtype, hardware.pick_device(config.device))
    return {
        "model_digest": who.digest,  # its folder may move
        "tuned": who.tuned,
        "quantization": who.quantization,
        "dtype": str(dtype).removeprefix("torch."),
    }


def settings_of(config: RegenerateConfig, who: Answering) -> dict[str, Any]:
    """Return all that decides which answers there are; a file is continued with the same only."""
    # greedy answers do not depend on how others would be drawn
    names = _DRAWN if config.temperature else ("temperature", "max_new_tokens")
    chosen = {name: getattr(config, name) for name in (*names, "keep_truncated")}
    return weights_of(config, who) | chosen


def sampling_of(config: RegenerateConfig) -> Sampling:
    """Return how answers are drawn."""
    names = (*_DRAWN, "keep_truncated", "logprobs")
    return Sampling(**{name: getattr(config, name) for name in names})


def load_engine(config: RegenerateConfig, who: Answering) -> Engine:
    """Load the base model, and the heads of ``checkpoint`` where there is one."""
    device, dtype, _ = hardware.prepare(config.device, config.dtype, config.threads)
    trust, revision = config.trust_remote_code, config.revision
    on: dict[str, Any] = {"dtype": dtype, "device": device, "trust_remote_code": trust}
    drafter = None
    if config.checkpoint:
        original = None if who.tuned else config.model or None
        on["other_base"] = config.other_base
        export = load_export(config.checkpoint, base=original, **on)
        base, tokenizer, drafter = export.base, export.tokenizer, exported_drafter(export)
    else:
        tokenizer = bases.load_tokenizer(who.model, revision=revision, trust_remote_code=trust)
        base = bases.load_base_model(who.model, revision=revision, attn="auto", **on)
        bases.check_tokenizer(tokenizer, base)
    turns = TurnEncoder(tokenizer, bases.end_tokens(base, tokenizer))
    made = {"model": who.model, "revision": revision, **asdict(who)}
    made["dtype"] = str(base.dtype).removeprefix("torch.")
    sampling, size = sampling_of(config), config.batch_size
    return Engine(base, turns, sampling, made | drawn_by(config), drafter=drafter, batch_size=size)


def drawn_by(config: RegenerateConfig) -> dict[str, Any]:
    """Return JSON about how answers are drawn, for every answered record."""
    return {name: getattr(config, name) for name in _DRAWN} | {"specheads": __version__}
