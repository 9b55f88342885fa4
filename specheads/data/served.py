"""Hidden states of a frozen base from a running server, for the micro-batches that come next.

The server is vLLM with its ``ExampleHiddenStatesConnector``. Asked for one token after a text, it
answers with the path of a file on a disk that both see: ``token_ids`` [n] and ``hidden_states``
[n, layers, d], what layers of the base put out before the final norm. Every file is deleted once it
is read, so that the disk holds what is asked for at one time, and no more.

A server does not say for which layers it was started. So it is asked for a short text whose states
the base here gives too: again with every micro-batch, as another server may have taken its place.

Shapes: B T batch, n tokens of one text, s states of each token, d hidden size.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config import RunError
from specheads.data.chat import Encoded
from specheads.data.pack import Batch
from specheads.models.base import input_device
from specheads.models.forward import undisturbed
from specheads.models.names import base_digest
from specheads.models.output import (
    FINAL,
    LAYER,
    final_norm,
    layers_behind,
    layers_of,
    packed_taps,
)
from specheads.system.client import Client, ServerError
from specheads.system.signals import StopSignal

AHEAD = 2  # micro-batches that are asked for before they are needed
AT_ONCE = 32  # requests, and with them files, at one time
_ANSWER_SECONDS = 120.0  # without a byte, after which a request is sent again
_PAUSE = 1.0  # seconds before a request is sent again
_PROBE = range(1, 9)  # token ids of the text that tells servers apart
# distance of states of the same weights, relative to their length; half precision rounds them
_ALIKE, _ALIKE_ROUNDED = 1e-3, 0.1


class StatesServer:
    """A server of hidden states that has been found to be of this base.

    Args:
        url: the server's address with its version, like ``http://localhost:8000/v1``.
        base: the base model; its final norm makes the final states of the last layer's.
        digest: of the base's weights, see :func:`specheads.models.names.base_digest`.
        taps: which hidden states, see :func:`specheads.models.output.capture_hidden`.
        patience: seconds for which a server that fails is asked again.
        say: told once when that begins.

    Raises:
        ConfigError: for a url that is none.
        RunError: if the server's states are not the base's at these taps, or it gave none.
    """

    def __init__(
        self,
        url: str,
        base: PreTrainedModel,
        digest: str,
        taps: Sequence[str],
        *,
        patience: float,
        say: Callable[[str], object],
    ) -> None:
        self._client = Client(url, timeout=min(patience, _ANSWER_SECONDS), retries=0)
        self._base, self._taps, self._patience, self._say = base, taps, patience, say
        self._trouble = self._said = ""
        self._pool = ThreadPool(AT_ONCE)  # of daemons: a server that hangs holds no process up
        self._jobs: deque[AsyncResult[Any]] = deque(maxlen=AHEAD + 1)
        weakref.finalize(self, _close, self._client, self._pool, self._jobs)
        listed = self._wait(self._pool.apply_async(self._asked, (self._client.models,)))
        if not listed:
            raise self._other("it lists no models")
        self._model, root = listed[0]["id"], Path(str(listed[0].get("root")))
        if root.is_dir() and base_digest(str(root)) != digest:
            raise self._other(f"it serves {root}, which holds other weights")
        self._norm = final_norm(base)
        self._norm_weight = next(self._norm.parameters())
        self._own = self._layers_here()
        probe = self._wait(self._pool.apply_async(self._states, (list(_PROBE),)))
        self._at = self._places(probe)

    def ask(self, texts: Iterable[list[int]]) -> AsyncResult[Any]:
        """Ask for the states of texts, given as token ids; :meth:`answer` waits for them."""
        self._jobs.append(self._pool.map_async(self._states, [*texts, list(_PROBE)], chunksize=1))
        return self._jobs[-1]

    @torch.no_grad()
    def answer(self, asked: AsyncResult[Any]) -> list[Tensor]:
        """Return the states [n, taps * d] of each text.

        Raises:
            RunError: if the server did not give them, or is another one by now.
        """
        *found, probe = self._wait(asked)
        if self._places(probe) != self._at:
            raise self._other("its layers have another order than before")
        answers = []
        for states in found:
            parts = states.to(self._norm_weight.device)[:, self._at].unbind(1)
            pairs = zip(self._taps, parts, strict=True)
            answers.append(torch.cat([self._norm(x) if t == FINAL else x for t, x in pairs], -1))
        return answers

    def of(self, documents: Sequence[Encoded]) -> Iterator[Tensor]:
        """Yield the states [n, taps * d] of each document, a few of which are held at one time."""
        for first in range(0, len(documents), AT_ONCE):
            some = documents[first : first + AT_ONCE]
            yield from self.answer(self.ask(each.input_ids.tolist() for each in some))

    def filled(self, batch: Batch, asked: AsyncResult[Any] | None = None) -> Batch:
        """Return the batch with ``hidden`` [B, T, taps * d], 0 in the padding.

        Args:
            batch: as ``pack.collate`` lays it out.
            asked: what its texts have been asked for with.
        """
        answers = self.answer(asked or self.ask(texts_of(batch)))
        hidden = answers[0].new_zeros(*batch["input_ids"].shape, answers[0].shape[1])
        for place, states in zip(_places_of(batch), answers, strict=True):
            hidden[place] = states
        return {**batch, "hidden": hidden}

    def _wait(self, asked: AsyncResult[Any]) -> Any:
        begun = time.monotonic()
        while not asked.ready():
            asked.wait(1.0)
            trouble = self._trouble
            if trouble and not self._said:
                self._say(f"{self._name}: {trouble}; waiting for up to {self._patience:g} s")
            self._said = trouble
            signal = StopSignal.installed.name if StopSignal.installed else ""
            if (trouble and signal) or time.monotonic() - begun > self._patience:
                self._client.stopped.set()
                why = signal or f"no answer for {self._patience:g} s (dist_timeout)"
                raise RunError(f"{self._name}: {trouble or 'it is silent'}; {why}")
        return asked.get()

    @property
    def _name(self) -> str:
        return f"features.endpoint={self._client.url}"

    def _other(self, problem: str) -> RunError:
        return RunError(
            f"{self._name} does not serve the hidden states that this run needs: {problem};"
            " scripts/engine_features.py starts a server that does"
        )

    @torch.no_grad()
    def _layers_here(self) -> Tensor:
        """Return what each of the base's layers puts out for the probe, [n, layers, d]."""
        every = [f"{LAYER}{i}" for i in range(len(layers_of(self._base)))]
        ids = torch.tensor([_PROBE], device=input_device(self._base))
        with undisturbed(self._base):
            _, hidden = packed_taps(self._base, ids, torch.arange(len(_PROBE))[None].to(ids), every)
        return hidden[0].unflatten(1, (len(every), -1)).float().cpu()

    def _places(self, probe: Tensor) -> list[int]:
        """Return which of the server's states [n, s, d] each tap is made of."""
        if probe.shape[2] != self._own.shape[2]:
            raise self._other(f"{probe.shape[2]} numbers a state, expected {self._own.shape[2]}")
        limit = _ALIKE if probe.dtype == torch.float32 else _ALIKE_ROUNDED
        apart = torch.cdist(
            probe.float(), self._own, compute_mode="donot_use_mm_for_euclid_dist"
        )  # [n, s, layers]
        apart = (apart / self._own.norm(dim=-1)[:, None]).median(0).values
        found = []
        for layer in layers_behind(self._base, self._taps):
            at = int(apart[:, layer - 1].argmin())
            distance = float(apart[at, layer - 1])
            # the states of neighbouring layers may be alike
            if not distance <= min(limit, float(apart[at].min())):
                raise self._other(f"those behind layer {layer} are {distance:.2g} away from them")
            found.append(at)
        return found

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """Return what ``ask`` does; asks again while the server fails, until the run ends."""
        while not self._client.stopped.is_set():
            try:
                found = ask()
            except ServerError as error:
                if not error.transient:
                    raise RunError(f"{self._name}: {error}") from None
                self._trouble = str(error)
                self._client.stopped.wait(_PAUSE)
            else:
                self._trouble = ""
                return found
        return None

    def _states(self, ids: list[int]) -> Tensor:
        """Return the server's states [n, s, d] of a text."""
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        found: Tensor = self._asked(
            lambda: self._read(self._client.call("/completions", body), ids)
        )
        return found

    def _read(self, answer: dict[str, Any], ids: list[int]) -> Tensor:
        """Return what the file holds that an answer names, and delete it."""
        path = Path(str((answer.get("kv_transfer_params") or {}).get("hidden_states_path")))
        # whatever path a server says, no other file is deleted
        if not path.name.startswith(f"{answer.get('id')}-") or path.suffix != ".safetensors":
            raise ServerError(
                f"no file of hidden states of {answer.get('id')} in its answer: {path}"
            )
        lock = Path(f"{path}.lock")
        try:
            with lock.open("rb") as held:
                fcntl.flock(held, fcntl.LOCK_SH)  # which the server holds until the file is whole
            tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
            tokens, states = tensors["token_ids"].tolist(), tensors["hidden_states"]
        except (OSError, SafetensorError, KeyError) as error:  # it ended while it wrote
            raise ServerError(f"cannot read {path}: {error}", transient=True) from None
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                lock.unlink(missing_ok=True)
        if tokens != ids or states.ndim != 3 or len(states) != len(ids):
            raise self._other(f"{path} held {list(states.shape)} for a text of {len(ids)} tokens")
        if states.dtype != self._norm_weight.dtype:
            raise self._other(f"{states.dtype}, expected {self._norm_weight.dtype} (model.dtype)")
        if not bool(states.isfinite().all()):
            raise RunError(f"{self._name}: hidden states are not finite")
        return states


def _close(client: Client, pool: ThreadPool, jobs: Iterable[AsyncResult[Any]]) -> None:
    """End the threads; what they have asked for they still read and delete."""
    client.stopped.set()
    pool.close()
    for job in jobs:
        job.wait(10.0)  # no longer for a server that hangs


def texts_of(batch: Batch) -> list[list[int]]:
    """Return the texts of a batch as token ids, row by row."""
    return [batch["input_ids"][place].tolist() for place in _places_of(batch)]


def _places_of(batch: Batch) -> Iterator[tuple[int, Tensor]]:
    """Yield row and mask [T] of each text of a batch."""
    for row, segments in enumerate(batch["segment_ids"]):
        for segment in range(1, int(segments.max()) + 1):
            yield row, segments == segment


class ServedBatches:
    """Batches with hidden states that a server gives, asked for some batches ahead.

    The saved place is behind what was returned, whatever was asked for.

    Args:
        batches: this rank's.
        server: gives the states.
    """

    def __init__(self, batches: Any, server: StatesServer) -> None:
        self.batches, self.server = batches, server
        self._place = batches.state_dict()
        self._ahead: deque[tuple[Batch, dict[str, Any], AsyncResult[Any]]] = deque()

    def __next__(self) -> Batch:
        """Return the next batch, with ``hidden`` [B, T, s * d].

        Raises:
            RunError: if the server does not give it, for longer than its patience.
        """
        while len(self._ahead) <= AHEAD:
            batch = next(self.batches)
            asked = self.server.ask(texts_of(batch))
            self._ahead.append((batch, self.batches.state_dict(), asked))
        batch, place, asked = self._ahead[0]
        filled = self.server.filled(batch, asked)
        self._ahead.popleft()
        self._place = place
        return filled

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data; plain JSON, the same as without a server."""
        return self._place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place."""
        self._ahead.clear()
        self.batches.load_state_dict(state)
        self._place = self.batches.state_dict()
