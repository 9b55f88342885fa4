"""What is trained, as a module that returns one loss: heads, a base model, both, a draft model.

The loss lives in forward, whole, so that any engine trains it with one backward; a backward per
head is silently wrong under ZeRO.

Every mean is over the valid labels of the whole optimizer step, which the batch carries as
``num_valid``: a micro-batch returns its share, and shares add up.

A batch has ``input_ids``, ``labels`` (unshifted), ``position_ids`` and ``segment_ids`` [B, T], and
``num_valid`` [K + 1] (language model, then heads); without it the batch counts for itself.
Shapes: B T batch, N = B * T, M positions in use, K heads, G groups of labels, d hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from specheads.config.training import DraftConfig, LossConfig
from specheads.losses.cross_entropy import count_valid, linear_cross_entropy, shift_labels
from specheads.losses.distill import SoftLoss, StoredTeacher, Teacher, linear_soft_loss
from specheads.losses.fused import IGNORE, Output, likelihoods, log_sums
from specheads.models.adapters import original, require_grad
from specheads.models.kinds import Heads
from specheads.models.output import FINAL, OutputLayer, output_layer, packed_taps, with_final
from specheads.training.engine import Batch, Objective

Metrics = dict[str, Tensor]


class LMObjective(Objective):
    """Next-token loss of the base model alone; for pretraining.

    Args:
        base: the model, all of it trained.
        loss: how the loss is computed; the defaults if None.
        output: the base's output layer; None finds it.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        loss: LossConfig | None = None,
        output: OutputLayer | None = None,
    ) -> None:
        super().__init__()
        self.base, self.loss = base, loss or LossConfig()
        self.output = output or output_layer(base)
        require_grad(base, True)

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return this micro-batch's share of the mean loss, and of ``lm/loss|top1|top5``."""
        labels, weight, num_valid = next_labels(batch)
        hidden = final_states(self.base, batch)
        loss, stats = cross_entropy(hidden, self.output.parts(), labels, weight, self.loss)
        return loss * self.engine_scale, metrics_of(["lm"], loss, stats, num_valid)


def cross_entropy(
    hidden: Tensor, output: Output, labels: Tensor, weights: Tensor, loss: LossConfig
) -> tuple[Tensor, Tensor]:
    """Return the loss of one group of labels [N] with a weight [], or of [G, N] with [G].

    There may also be a weight for each label.
    """
    each = weights if weights.shape == labels.shape else weights.unsqueeze(-1).expand_as(labels)
    return linear_cross_entropy(hidden, output, labels, each, chunk_size=loss.chunk_size)


def next_labels(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the labels [B * T] of the next tokens, the weight [] of each, and num_valid [1]."""
    num_valid = num_valid_of(batch, 0)
    labels = shift_labels(batch["labels"], batch["segment_ids"], 1).flatten()
    return labels, per_label([1.0], num_valid)[0], num_valid


def final_states(base: PreTrainedModel, batch: Batch) -> Tensor:
    """Return a model's final hidden states [B * T, d] of a batch."""
    hidden, _ = packed_taps(base, batch["input_ids"], batch["position_ids"], (FINAL,))
    return hidden.flatten(0, 1)


def num_valid_of(batch: Batch, num_heads: int) -> Tensor:
    """Return the batch's ``num_valid`` [K + 1], or its own counts where it carries none.

    Raises:
        ValueError: if they were counted for another number of heads.
    """
    num_valid = batch.get("num_valid")
    if num_valid is None:
        num_valid = count_valid(batch["labels"], batch["segment_ids"], num_heads)
    if num_valid.shape != (num_heads + 1,):
        raise ValueError(
            f"num_valid has shape {tuple(num_valid.shape)}, {num_heads} heads need "
            f"({num_heads + 1},)"
        )
    return num_valid.to(torch.float32)


def per_label(factors: Sequence[float], num_valid: Tensor) -> Tensor:
    """Divide each group's factor by its number of labels; 0 for a group without any."""
    share = num_valid.new_tensor(factors) / num_valid.clamp_min(1.0)
    return torch.where(num_valid > 0, share, 0.0)


def metrics_of(names: Sequence[str], loss: Tensor, stats: Tensor, num_valid: Tensor) -> Metrics:
    """Return this batch's share of ``loss`` and of ``<name>/loss|top1|top5`` of every group."""
    shares = stats.detach() / num_valid.clamp_min(1.0)[:, None]
    metrics = {"loss": loss.detach()}
    for name, row in zip(names, shares.unbind(), strict=True):
        metrics |= {f"{name}/{kind}": row[i] for i, kind in enumerate(("loss", "top1", "top5"))}
    return metrics


class HeadsObjective(Objective):
    """Loss of heads, with or without the base model (arXiv:2401.10774, sections 2.2).

    With a decay and lambda_0 of 1 it is the sum of n = K + 1 losses of multi-token prediction
    (arXiv:2404.19737, equation 2), each a mean over its own labels.

    ``train_base=False`` (Medusa-1): sum_i decay^(i+1) L_i; the base, output matrix included, is
    frozen and runs in eval mode without gradients. ``train_base=True`` (Medusa-2):
    L_LM + lambda_0 * lambda_scale * sum_i decay^(i+1) L_i. L_i is the mean loss of head i over its
    own valid labels; a head that has none adds 0. With ``loss.base=distill`` L_LM is
    KL(original || base), the original being the base with its adapter off.

    A batch may carry ``hidden`` [B, T, n * d], the frozen base's hidden states at the heads' taps
    and then the final ones, where these are no tap: it is then not run.

    Args:
        base: the base model; None if every batch carries ``hidden``.
        heads: its heads.
        loss: what the heads learn from, and how their losses are weighed; the defaults if None.
            ``loss.base="distill"`` holds a trained base to its original instead of to the labels.
        train_base: whether the base is trained too; one with an adapter trains that alone.
        output: the base's output layer; None finds it.

    Raises:
        ValueError: if the heads were built for another hidden size or vocabulary, or something is
            asked for that needs the base, and there is none.
    """

    def __init__(
        self,
        base: PreTrainedModel | None,
        heads: Heads,
        loss: LossConfig | None = None,
        *,
        train_base: bool,
        output: OutputLayer | None = None,
    ) -> None:
        super().__init__()
        if base is None and (train_base or output is None):
            raise ValueError("without a base model there must be output, and train_base be False")
        self.base, self.heads, self.loss = base, heads, loss or LossConfig()
        self.output = output or output_layer(base)  # type: ignore[arg-type]
        expected, found = tuple(self.output.weight.shape), (heads.vocab_size, heads.hidden_size)
        if expected != found:
            raise ValueError(f"the heads are for an output matrix {found}, the base has {expected}")
        self.num_heads, self.train_base = heads.num_heads, train_base
        self.distill_base = train_base and self.loss.base == "distill"
        if base is not None:
            heads.read_through(base)
            require_grad(base, train_base)
        self.train(self.training)

    def train(self, mode: bool = True) -> HeadsObjective:
        """Set the mode of heads and base; a frozen base stays in eval mode."""
        super().train(mode)
        if self.base is not None and not self.train_base:
            self.base.eval()
        return self

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return this micro-batch's share of the loss, and of each metric.

        Metrics: ``loss``, ``head_{i}/loss|top1|top5``, and ``lm/...`` where the base is trained.
        """
        share = 1.0 / self.num_heads if self.loss.average else 1.0
        decay = 1.0 if self.loss.pace else self.loss.decay
        factors = [share * decay ** (i + 1) for i in range(self.num_heads)]
        if self.train_base:
            by = self.loss.lambda_0 * self.lambda_scale
            factors = [1.0, *(by * factor for factor in factors)]
        num_groups = len(factors)  # the heads, behind the language model where it is trained
        num_valid = num_valid_of(batch, self.num_heads)[-num_groups:]
        weights = per_label(factors, num_valid)
        offsets = range(self.num_heads + 2 - num_groups, self.num_heads + 2)
        given = batch["labels"], batch["segment_ids"]
        labels = torch.stack([shift_labels(*given, offset).flatten() for offset in offsets])
        places = None
        if self.heads.anchors:
            places = anchors_of(batch["input_ids"], (labels != IGNORE).any(0), self.heads.anchors)
            labels, times = at_anchors(labels, places)
            weights = weights * times
        loss, stats = self._loss(self._rows(batch, labels, places), weights)
        stats = stats if places is None else stats * times[:, None]
        names = ["lm"] * self.train_base + [f"head_{i}" for i in range(self.num_heads)]
        return loss * self.engine_scale, metrics_of(names, loss, stats, num_valid)

    def _rows(self, batch: Batch, labels: Tensor, places: Tensor | None) -> _Rows:
        """Run the base, and keep the positions where something is learned.

        Args:
            batch: the batch.
            labels: [G, B * T], or of the places alone [G, B * A].
            places: [B, A], where the heads are asked; None for everywhere.
        """
        train_base = self.train_base and torch.is_grad_enabled()
        ids, positions = batch["input_ids"], batch["position_ids"]
        if "hidden" in batch:
            hidden = tapped = batch["hidden"]
            taps, size = self.heads.taps, self.heads.hidden_size
            if (found := tapped.shape[-1]) != (wanted := len(with_final(taps)) * size):
                raise ValueError(
                    f"a batch has hidden states of {found} numbers; those at"
                    f" {', '.join(with_final(taps))} are {wanted}"
                )
            if taps != (FINAL,):
                at = with_final(taps).index(FINAL) * size
                hidden, tapped = tapped[..., at : at + size], tapped[..., : len(taps) * size]
        else:
            assert self.base is not None
            with torch.set_grad_enabled(train_base):
                found = packed_taps(self.base, ids, positions, self.heads.taps)
            hidden, tapped = (states.to(ids.device) for states in found)
        asked = {} if places is None else {"places": places}
        source = self.heads.contextual(tapped, positions, ids, **asked)
        same = source is hidden
        source = source.flatten(-3, -2)
        teacher = self._teacher(batch, hidden)
        hidden = hidden.flatten(0, 1)
        num_rows = hidden.shape[0]
        # blocks need not run where nothing is learned
        used = (labels != IGNORE).any(0).nonzero().squeeze(1)
        labels = labels.index_select(1, used)
        source = source if same else source.index_select(-2, used)
        if places is not None:
            rows = torch.arange(len(places), device=places.device)[:, None]
            used = (places + rows * ids.shape[1]).flatten().index_select(0, used)
        hidden = hidden.index_select(0, used)
        source = hidden if same else source
        tokens = None
        if self.heads.sequential:
            # where head i has a label, the tokens up to it are of the same document
            ahead = torch.arange(1, self.num_heads + 1, device=used.device)
            tokens = ids.flatten()[(used[:, None] + ahead).clamp_max(num_rows - 1)]
        return _Rows(hidden, source, labels, tokens, teacher, self._log_sum(teacher, used), used)

    def _teacher(self, batch: Batch, hidden: Tensor) -> Tensor | None:
        """Return hidden states [N, d] whose logits are the distribution to be learned."""
        if self.distill_base:
            assert self.base is not None
            with torch.no_grad(), original(self.base):
                return final_states(self.base, batch)
        return None if self.loss.heads == "hard" else hidden.detach().flatten(0, 1)

    @property
    def _soft(self) -> SoftLoss:
        loss = self.loss
        return SoftLoss(loss.heads, loss.top_k, loss.temperature, loss.lk_eta)

    def _log_sum(self, teacher: Tensor | None, used: Tensor) -> Tensor | None:
        """Return the teacher's [N] at the positions that a head asks about; None if none does."""
        if teacher is None or self.heads.token_map is None or self.loss.heads == "hard":
            return None
        if not self._soft.needs_log_sum:
            return None
        ahead = torch.arange(1, self.num_heads + 1, device=used.device)
        asked = (used[:, None] + ahead).clamp_max(len(teacher) - 1).unique()
        sums = log_sums(teacher[asked], self.output.parts(), self.loss.temperature)
        return sums.new_zeros(len(teacher)).index_copy(0, asked, sums)

    def _loss(self, rows: _Rows, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of all groups' losses, and their statistics [G, 3]."""
        output, labels = self.output.parts(), rows.labels
        # a matrix that gets no gradient, as under an adapter, needs no call for all together
        trained = self.train_base and output.weight.requires_grad
        plain = self.loss.heads == "hard" and not self.distill_base
        if self.loss.pace:
            last = slice(-self.num_heads, None)
            weights = weights[:, None].repeat(1, labels.shape[1])
            weights[last] *= paced(self._likelihoods(rows), labels[last] != IGNORE, self.loss.pace)
        one = self._head_output(0) if self.heads.one_matrix else None
        shared = one is not None and one.weight is output.weight
        if shared and trained and plain:
            # all groups in one call, so that one gradient buffer of the shared matrix exists
            features = (self._features(i, rows) for i in range(self.num_heads))
            joined = torch.cat([rows.hidden, *features])
            del features, rows  # copied, and K times as large as the base's hidden states
            return cross_entropy(joined, output, labels, weights, self.loss)
        parts = []
        if self.distill_base:
            teacher = rows.teacher_at([0], output)
            same = rows.hidden, output, teacher, labels[0], weights[0].expand_as(labels[0])
            parts.append(linear_soft_loss(*same, SoftLoss("soft"), self.loss.chunk_size))
        elif self.train_base:
            parts.append(cross_entropy(rows.hidden, output, labels[0], weights[0], self.loss))
        own, by = labels[-self.num_heads :], weights[-self.num_heads :]
        # a shared matrix that is frozen has no gradient to share
        together = one is not None and not shared
        every = list(range(self.num_heads))
        for those in [every] if together else [[i] for i in every]:
            matrix = one or self._head_output(those[0])
            parts.append(self._heads_loss(those, rows, own[those], by[those], matrix))
        losses, stats = zip(*parts, strict=True)
        return torch.stack(losses).sum(), torch.cat(stats)

    @torch.no_grad()
    def _likelihoods(self, rows: _Rows) -> Tensor:
        """Return how likely the heads find their labels, [K, M]."""
        found = []
        for i, labels in enumerate(rows.labels[-self.num_heads :]):
            known = self.heads.map_labels(labels)
            found.append(likelihoods(self._features(i, rows), self._head_output(i), known))
        return torch.stack(found)

    def _head_output(self, i: int) -> Output:
        heads, base = self.heads, self.output.parts()
        weight, bias = heads.output_weight(i, base.weight), heads.output_bias(base.bias)
        return replace(base, weight=weight, bias=bias)

    def _heads_loss(
        self, those: Sequence[int], rows: _Rows, labels: Tensor, weights: Tensor, output: Output
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of heads with one output, by labels [n, M], and statistics [n, 3].

        Its matrix may know fewer tokens: labels that it does not know are misses in the hits, and
        add nothing to the loss.
        """
        heads, loss = self.heads, self.loss
        features = [self._features(i, rows) for i in those]
        joined = torch.cat(features) if len(features) > 1 else features[0]
        del features
        if loss.heads == "hard":
            return cross_entropy(joined, output, heads.map_labels(labels), weights, loss)
        ahead = [i + 1 for i in those]
        teacher = rows.teacher_at(ahead, self.output.parts(), heads.token_map)
        each = weights.view(len(labels), -1).expand_as(labels)
        return linear_soft_loss(joined, output, teacher, labels, each, self._soft, loss.chunk_size)

    def _features(self, i: int, rows: _Rows) -> Tensor:
        """What head i's matrix reads, [M, d_i]; its inner activations are made again in backward.

        The joined matrix of a Markov correction is formed outside, where gradients reach it.
        """
        read = i, rows.source, rows.tokens
        if not torch.is_grad_enabled() or self.heads.num_layers == 0:
            return self.heads.features(*read)
        return checkpoint(self.heads.features, *read, use_reentrant=False, preserve_rng_state=False)


def anchors_of(input_ids: Tensor, learned: Tensor, count: int) -> Tensor:
    """Choose positions of each row at random, those where something is learned first.

    They follow from the row's tokens, so that a run that is resumed, or spread over other
    processes, chooses the same; in another epoch documents lie in other rows.

    Args:
        input_ids: [B, T].
        learned: [B * T] bool.
        count: at most so many.

    Returns:
        [B, min(count, T)], in ascending order.
    """
    num_rows, num_tokens = input_ids.shape
    places = torch.arange(num_tokens, device=input_ids.device)
    number = (input_ids * (places * 2 + 1)).sum(1, keepdim=True) + places * 0x9E3779B9
    for factor in (0x45D9F3B, 0x2C1B3C6D):  # as integers are hashed: every bit moves all others
        number = ((number ^ (number >> 16)) * factor) & 0xFFFFFFFF
    number = (number ^ (number >> 16)) - (learned.view(num_rows, -1).long() << 32)
    return number.topk(min(count, num_tokens), dim=1, largest=False).indices.sort(1).values


def paced(likelihood: Tensor, learned: Tensor, a: float) -> Tensor:
    """Return how much each guess matters for how many are accepted, [K, M] (arXiv:2605.18810).

    A guess counts if those before it were right: with c = (1 - a) * q + a of the likelihoods q the
    weight of guess k is the sum over j >= k of c_1 * ... * c_j. With a = 1 all before count as
    right. Where nothing is learned, and behind that, no guess counts.

    Args:
        likelihood: [K, M], q of each guess's label, 0 where it cannot be guessed.
        learned: [K, M] bool.
        a: from 0 to 1.
    """
    chance = torch.where(learned, likelihood.lerp(torch.ones_like(likelihood), a), 0.0)
    return chance.cumprod(0).flip(0).cumsum(0).flip(0)


def at_anchors(labels: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labels at some places, and how many times as many there are in all.

    Args:
        labels: [G, B * T].
        places: [B, A].

    Returns:
        [G, B * A], and [G]: by it a sum over the places is an estimate of that over all labels.
    """
    each = labels.view(len(labels), len(places), -1)
    found = each.gather(2, places.expand(len(labels), -1, -1)).flatten(1)
    counts, kept = ((some != IGNORE).sum(1) for some in (labels, found))
    return found, counts / kept.clamp_min(1)


@dataclass(frozen=True)
class _Rows:
    """The M positions of a batch where something is learned.

    ``hidden`` [M, d] of the base and ``source``, what the heads read of it: [M, d], or [K, M, d];
    ``labels`` [G, M]; ``tokens`` [M, K], those that follow; ``teacher`` [N, d], hidden
    states of all positions, ``log_sum`` [N] of theirs, and ``places`` [M], where among them the
    rows stand.
    """

    hidden: Tensor
    source: Tensor
    labels: Tensor
    tokens: Tensor | None
    teacher: Tensor | None
    log_sum: Tensor | None
    places: Tensor

    def teacher_at(
        self, ahead: Sequence[int], output: Output, token_map: Tensor | None = None
    ) -> Teacher:
        """Return the teacher ``ahead`` positions after the rows' own, [M] for each, in a row.

        Rows whose label lies outside their document get some other row's, and are not looked at.
        """
        assert self.teacher is not None
        places = torch.cat([self.places + some for some in ahead])
        places = places.clamp_max(len(self.teacher) - 1)
        log_sum = None if self.log_sum is None else self.log_sum[places]
        return Teacher(self.teacher.index_select(0, places), output, token_map, log_sum)


LABELS = "labels"


class DraftObjective(Objective):
    """Loss of a draft model, with a frozen base as its teacher, stored or run beside it.

    A batch is that of ``objectives.py``. It may carry ``teacher_ids`` [B, T, k], the base's k
    most likely next tokens at every position, best first, and ``teacher_log_probs`` [B, T, k],
    their log-probabilities at temperature 1 (``data/teacher_cache.py``): the base is then not run,
    and the distance is taken over these k tokens and one bucket for all others.

    Where the output matrices have unequal sizes, padded ones say, both distributions are taken
    over the first ``vocab_size`` tokens and renormalised there.

    Args:
        draft: the draft model, all of it trained.
        base: the base model; frozen, in eval mode, run without gradients. None if every batch
            carries a stored teacher, or the loss needs none (``labels``, which with a base still
            reports the acceptance).
        draft_config: ``loss``: ``labels``, the cross entropy of the data's tokens, or a distance
            from the base's distribution, ``forward_kl`` or a kind of
            :class:`specheads.losses.distill.SoftLoss`; ``jsd_beta``. The defaults if None.
        loss: ``temperature``, ``top_k`` and ``lk_eta`` of the distance; how losses are computed.
        vocab_size: tokens to compare, that both models have; None: all, of two models with equally
            many.
        output: the draft's output layer; None finds it.
        base_output: the base's; None finds it.

    Raises:
        ValueError: for a loss that is infinite with its top_k.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        base: PreTrainedModel | None = None,
        draft_config: DraftConfig | None = None,
        loss: LossConfig | None = None,
        *,
        vocab_size: int | None = None,
        output: OutputLayer | None = None,
        base_output: OutputLayer | None = None,
    ) -> None:
        super().__init__()
        wanted, self.loss = draft_config or DraftConfig(), loss or LossConfig()
        self.draft, self.base, self.kind = draft, base, wanted.loss
        self.output = output or output_layer(draft)
        self.base_output = base_output or (None if base is None else output_layer(base))
        self.vocab_size = vocab_size or len(self.output.weight)
        self.soft_loss = SoftLoss("tv", compare=True)  # for labels: a teacher is compared with only
        if wanted.loss != LABELS:
            kind = "soft" if wanted.loss == "forward_kl" else wanted.loss
            own = self.loss.top_k, self.loss.temperature, self.loss.lk_eta, wanted.jsd_beta
            self.soft_loss = SoftLoss(kind, *own, compare=True)
        require_grad(draft, True)
        if base is not None:
            require_grad(base, False)
        self.train(self.training)

    def train(self, mode: bool = True) -> DraftObjective:
        """Set the mode of the draft model; the base stays in eval mode."""
        super().train(mode)
        if self.base is not None:
            self.base.eval()
        return self

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return this micro-batch's share of the mean loss, and of each metric.

        Metrics: ``loss``; ``lm/loss``, the cross entropy of the labels, and ``lm/top1``;
        ``draft/loss``, that of ``loss=``; ``draft/alpha``, the mean over the learned positions of
        sum_x min(base, draft) at temperature 1, over all tokens (arXiv:2211.17192). With a stored
        teacher only its k tokens are summed: ``draft/alpha_top``, a lower bound of it.

        Raises:
            ValueError: if the loss needs a teacher, and there is neither a base nor a stored one;
                or what is stored cannot give the distribution that is asked for.
        """
        teacher = self._teacher(batch)  # first, or the base's activations meet the draft's graph
        hidden = final_states(self.draft, batch)
        labels, weight, num_valid = next_labels(batch)
        sums: dict[str, Tensor] = {}
        if teacher is not None:
            # labels are learned in a pass of their own, so that this one forms no gradient then
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.kind != LABELS):
                loss, stats = linear_soft_loss(
                    hidden, _first(self.output, self.vocab_size), teacher, labels,
                    weight.expand_as(labels), self.soft_loss, self.loss.chunk_size,
                )  # fmt: skip
            alpha = "draft/alpha_top" if isinstance(teacher, StoredTeacher) else "draft/alpha"
            names = ("draft/loss", "lm/top1", None, "lm/loss", alpha)
            sums = {name: s for name, s in zip(names, stats[0], strict=True) if name}
        if self.kind == LABELS:
            loss, stats = cross_entropy(hidden, self.output.parts(), labels, weight, self.loss)
            sums |= {"draft/loss": stats[0, 0], "lm/loss": stats[0, 0], "lm/top1": stats[0, 1]}
        elif teacher is None:
            raise ValueError(
                f"loss {self.kind} needs a base model, or teacher_ids and teacher_log_probs in the"
                " batch"
            )
        share = 1.0 / num_valid[0].clamp_min(1.0)
        metrics = {"loss": loss.detach()} | {name: s * share for name, s in sums.items()}
        return loss * self.engine_scale, metrics

    @torch.no_grad()
    def _teacher(self, batch: Batch) -> Teacher | StoredTeacher | None:
        """Return the teacher of all N = B * T positions, where there is one."""
        if "teacher_ids" in batch:
            ids, log_probs = batch["teacher_ids"], batch["teacher_log_probs"]
            return StoredTeacher(ids.flatten(0, 1), log_probs.flatten(0, 1))
        if self.base is None:
            return None
        assert self.base_output is not None
        return Teacher(final_states(self.base, batch), _first(self.base_output, self.vocab_size))


def _first(layer: OutputLayer, size: int) -> Output:
    """Return the output of the first tokens; the matrix itself where these are all: no copy."""
    output = layer.parts()
    if output.weight.shape[0] == size:
        return output
    bias = None if output.bias is None else output.bias[:size]
    return replace(output, weight=output.weight[:size], bias=bias)
