"""The soft losses must be what autograd makes of their definitions, for every option together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.losses.cross_entropy import linear_cross_entropy
from specheads.losses.distill import KINDS, SoftLoss, Teacher, linear_soft_loss
from specheads.losses.fused import IGNORE, Output, log_sums
from tests.losses.test_losses import Watch, distance

VOCAB = 37
TOKEN_MAP = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:11]
BOUNDED = tuple(kind for kind in KINDS if kind != "reverse_kl")  # where the teacher has top_k


def problem(
    num_rows: int = 40,
    size: int = 6,
    dtype: torch.dtype = torch.float64,
    *,
    token_map: Tensor | None = None,
    vocab: int = VOCAB,
    finished: bool = False,
) -> dict[str, Any]:
    """Return arguments of the loss: a third of the rows ignored, two groups or five.

    ``finished`` gives both sides a bias, a scale and a softcap, different ones.
    """
    generator = torch.Generator().manual_seed(num_rows)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    labels = torch.randint(0, vocab, (num_rows,), generator=generator)
    labels[torch.rand(num_rows, generator=generator) < 0.3] = IGNORE
    outputs = vocab if token_map is None else len(token_map)
    groups = 2 if num_rows % 5 else 5
    theirs = randn(num_rows, size + 2), randn(vocab, size + 2)
    p: dict[str, Any] = {
        "hidden": randn(num_rows, size).requires_grad_(),
        "weight": randn(outputs, size).requires_grad_(),
        "teacher": Teacher(theirs[0], Output(theirs[1]), token_map),
        "labels": labels.view(groups, num_rows // groups),
        "row_weight": torch.rand(groups, num_rows // groups, generator=generator) / num_rows,
    }
    if finished:
        p |= {"bias": randn(outputs).requires_grad_(), "scale": 0.7, "softcap": 3.0}
        output = Output(theirs[1], randn(vocab), 1.2, 4.0)
        p["teacher"] = Teacher(theirs[0], output, token_map)
    return p


def output_of(p: dict[str, Any]) -> Output:
    """Return the student's output."""
    return Output(p["weight"], p.get("bias"), p.get("scale", 1.0), p.get("softcap"))


def soft_loss(p: dict[str, Any], chunk_size: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    """Return loss and statistics; the options are those of ``SoftLoss``."""
    rows = p["teacher"], p["labels"], p["row_weight"]
    return linear_soft_loss(p["hidden"], output_of(p), *rows, SoftLoss(**options), chunk_size)


def logits_of(hidden: Tensor, output: Output) -> Tensor:
    """Return finished logits [N, V] in float64."""
    z = hidden.double() @ output.weight.double().T
    z = (z if output.bias is None else z + output.bias.double()) * output.scale
    return z if output.softcap is None else output.softcap * torch.tanh(z / output.softcap)


def kl_of(a: Tensor, b: Tensor) -> Tensor:
    """Return KL(a || b) of two vectors of probabilities; tokens that a has not add nothing."""
    there = a > 0
    return (a[there] * (a[there] / b[there]).log()).sum()


def reference(p: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """Return loss and statistics by the definitions, row by row, all probabilities at hand."""
    p = {**p, **options}
    teacher, top_k = p["teacher"], p.get("top_k", 0)
    token_map, labels, row_weight = teacher.token_map, p["labels"], p["row_weight"].flatten()
    student = logits_of(p["hidden"], output_of(p))
    theirs = logits_of(teacher.hidden, teacher.output)
    t_all = (theirs.detach() / p.get("temperature", 1.0)).softmax(1)
    loss, stats = student.new_zeros(()), torch.zeros(len(labels), 3)
    for row in range(len(student)):
        label = int(labels.flatten()[row])
        if label == IGNORE:
            continue
        t = t_all[row]
        if top_k:
            keep = torch.zeros(len(t), dtype=torch.bool)
            keep[t.argsort(descending=True)[:top_k]] = True
            t = t * keep / t[keep].sum()
        s, order = student[row].softmax(0), student[row].argsort(descending=True)
        if token_map is not None:
            t, order = t[token_map], token_map[order]
        there = t > 0
        accepted = torch.where(s < t, s, t).sum()
        u, b = t / t.sum(), p.get("jsd_beta", 0.5)
        kl = kl_of(u, s)
        distance = {
            "soft": lambda kl=kl: kl,
            "reverse_kl": lambda s=s, u=u: kl_of(s, u),
            "jsd": lambda s=s, u=u, b=b: (
                b * kl_of(u, b * u + (1 - b) * s) + (1 - b) * kl_of(s, b * u + (1 - b) * s)
            ),
            "tv": lambda accepted=accepted: 1 - accepted,
            "lk_alpha": lambda accepted=accepted: -accepted.log(),
            "lk_lambda": lambda kl=kl, accepted=accepted: (
                (by := (-p.get("eta", 3.0) * accepted.detach()).exp()) * kl
                + (1 - by) * (1 - accepted)
            ),
        }[p["kind"]]()
        if not there.any() and p["kind"] != "tv":
            distance = 0.0 * student[row].sum()
        loss = loss + distance * row_weight[row]
        found = torch.tensor([float(distance.detach()), label == order[0], label in order[:5]])
        stats[row // labels.shape[1]] += found
    return loss, stats


def gradients(loss: Tensor, p: dict[str, Any]) -> dict[str, Tensor]:
    """Return the gradients of ``loss`` by the name of the argument."""
    names = [name for name in ("hidden", "weight", "bias") if p.get(name) is not None]
    return dict(zip(names, torch.autograd.grad(loss, [p[name] for name in names]), strict=True))


@pytest.mark.parametrize(
    ("kind", "top_k"), [(kind, k) for kind in KINDS for k in (0, 1, 6) if not k or kind in BOUNDED]
)
@pytest.mark.parametrize(
    ("token_map", "known"),
    [(None, False), (TOKEN_MAP, False), (TOKEN_MAP, True)],
    ids=["full", "pruned", "pruned, sums known"],
)
@pytest.mark.parametrize("finished", [False, True])
def test_loss_and_gradients_are_those_of_the_definition(
    kind: str, token_map: Tensor | None, known: bool, top_k: int, finished: bool
) -> None:
    """Gradients made by hand that are off by a factor only show as slightly worse training."""
    p = problem(20, token_map=token_map, finished=finished)
    for chunk_sizes, (temperature, eta, beta) in (
        ((0, 7), (1.0, 3.0, 0.5)),
        ((1, 64), (0.6, 10.0, 0.1)),
    ):
        options = {"kind": kind, "top_k": top_k, "temperature": temperature}
        options |= {"eta": eta, "jsd_beta": beta}
        loss, stats = reference(p, **options)
        expected = gradients(3.0 * loss, p)
        if known:
            theirs = p["teacher"]
            sums = log_sums(theirs.hidden, theirs.output, temperature)
            p["teacher"] = replace(theirs, log_sum=sums)
        for chunk_size in chunk_sizes:
            found, found_stats = soft_loss(p, chunk_size, **options)
            assert distance(found.detach(), loss.detach()) < 1e-12
            for name, grad in gradients(3.0 * found, p).items():
                assert distance(grad, expected[name]) < 1e-11, name
            assert torch.allclose(found_stats, stats, rtol=1e-6)
            assert torch.equal(found_stats[:, 1:], stats[:, 1:])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_against_finite_differences(kind: str) -> None:
    """The reference could share a mistake; finite differences do not. lk_lambda's weight is fixed.

    Its stop-gradient is checked by freezing the weight at the unmoved acceptance.
    """
    p, step = problem(num_rows=5, size=3, token_map=TOKEN_MAP), 1e-6
    loss, _ = soft_loss(p, kind=kind)
    for name, grad in gradients(loss, p).items():
        for i in range(0, grad.numel(), 4):
            values = []
            for sign in (1, -1):
                moved = p[name].detach().clone()
                moved.view(-1)[i] += sign * step
                q = {**p, name: moved}
                if kind != "lk_lambda":
                    values.append(soft_loss(q, kind=kind)[0])
                    continue
                here = per_row(p, "tv")
                by = (-3.0 * (1 - here)).exp()
                kl, tv = per_row(q, "soft"), per_row(q, "tv")
                values.append(((by * kl + (1 - by) * tv) * p["row_weight"].flatten()).sum())
            slope = float((values[0] - values[1]).detach()) / (2 * step)
            assert abs(slope - float(grad.view(-1)[i])) < 1e-7


@torch.no_grad()
def per_row(p: dict[str, Any], kind: str) -> Tensor:
    """Return the distance of each row [N], 0 where it is ignored, by asking for them one by one."""
    count, shape = p["labels"].numel(), p["labels"].shape
    unit = torch.eye(count, dtype=torch.float64).view(count, *shape)
    return torch.stack([soft_loss({**p, "row_weight": r}, kind=kind)[0] for r in unit])


def test_gradient_of_lk_alpha_is_the_published_formula() -> None:
    """-q * (1[q < p] - sum q 1[q < p]) / alpha, from arXiv:2602.23881, not from our own code."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(9, 20, generator=generator, dtype=torch.float64).softmax(1)
    z = torch.randn(9, 20, generator=generator, dtype=torch.float64).requires_grad_()
    loss, _ = lossy(z, p.log(), "lk_alpha")
    q = z.detach().softmax(1)
    alpha, below = torch.minimum(p, q).sum(1, keepdim=True), (q < p).double()
    expected = -q * (below - (q * below).sum(1, keepdim=True)) / alpha
    (found,) = torch.autograd.grad(loss, z)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-15)
    (tv,) = torch.autograd.grad(lossy(z, p.log(), "tv")[0], z)
    assert torch.allclose(tv, expected * alpha, rtol=1e-12, atol=1e-15)


def lossy(z: Tensor, teacher_logits: Tensor, kind: str, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of given logits: the output matrices are the identity, weights are 1."""
    count, vocab = teacher_logits.shape
    output = Output(torch.eye(vocab, dtype=teacher_logits.dtype))
    return linear_soft_loss(
        z,
        Output(torch.eye(z.shape[1], dtype=z.dtype)),
        Teacher(teacher_logits, output, options.pop("token_map", None)),
        options.pop("labels", torch.zeros(count, dtype=torch.int64)),
        torch.ones(count, dtype=z.dtype),
        SoftLoss(kind, **options),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_perfect_student_has_no_loss_and_no_gradient(kind: str, dtype: torch.dtype) -> None:
    """A cross entropy that kept the teacher's entropy would never reach 0: nobody sees the end."""
    z = (3 * torch.randn(8, 30, generator=torch.Generator().manual_seed(1))).to(dtype)
    student = z.clone().requires_grad_()
    loss, stats = lossy(student, z, kind)
    (grad,) = torch.autograd.grad(loss, student)
    assert abs(loss.item()) < 1e-5
    assert float(stats[0, 0]) < 1e-5 and float(grad.abs().max()) < 1e-5


def test_jsd_tends_to_either_kl() -> None:
    """With the two sides of the mixture exchanged, beta would pull towards the wrong one."""
    p, beta = problem(), 1e-9
    for kind, near in (("soft", beta), ("reverse_kl", 1 - beta)):
        expected, _ = soft_loss(p, kind=kind)
        found, _ = soft_loss(p, kind="jsd", jsd_beta=near)
        assert distance((found / beta).detach(), expected.detach()) < 1e-3
        for name, grad in gradients(found / beta, p).items():
            again = gradients(soft_loss(p, kind=kind)[0], p)[name]
            assert distance(grad, again) < 1e-3, name


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"temperature": 0.5, "top_k": 9}])
@pytest.mark.parametrize("kind", BOUNDED)
def test_what_is_compared_does_not_depend_on_the_loss(kind: str, options: dict[str, Any]) -> None:
    """An acceptance at the loss's own temperature and top_k is another quantity than alpha."""
    p = problem(finished=True)
    loss, stats = soft_loss(p, 7, kind=kind, **options)
    again, more = soft_loss(p, 7, kind=kind, **options, compare=True)
    assert torch.allclose(loss, again, rtol=1e-12) and torch.allclose(stats, more[:, :3])
    found, expected = gradients(again, p), gradients(loss, p)
    assert all(distance(found[name], grad) < 1e-12 for name, grad in expected.items())
    teacher, labels = p["teacher"], p["labels"].flatten()
    student = logits_of(p["hidden"], output_of(p)).detach()
    theirs = logits_of(teacher.hidden, teacher.output)
    accepted = torch.minimum(student.softmax(1), theirs.softmax(1)).sum(1)
    ce = -student.log_softmax(1).gather(1, labels.clamp_min(0)[:, None]).squeeze(1)
    groups = torch.arange(len(labels)) // p["labels"].shape[1]
    for group in range(len(p["labels"])):
        rows = (groups == group) & (labels != IGNORE)
        assert more[group, 3].item() == pytest.approx(ce[rows].sum().item(), rel=1e-6)
        assert more[group, 4].item() == pytest.approx(accepted[rows].sum().item(), rel=1e-6)


def test_one_token_makes_lk_alpha_and_soft_the_cross_entropy() -> None:
    """Hard labels are the case of one token; top_k=1 makes them of the teacher's best one."""
    p = problem(num_rows=30)
    z = logits_of(p["teacher"].hidden, p["teacher"].output)
    best = torch.where(p["labels"] == IGNORE, IGNORE, z.argmax(1).view(p["labels"].shape))
    rows = p["hidden"], output_of(p), best, p["row_weight"]
    expected, expected_stats = linear_cross_entropy(*rows)
    for kind in ("lk_alpha", "soft"):
        loss, stats = soft_loss(p, kind=kind, top_k=1)
        assert distance(loss.detach(), expected.detach()) < 1e-12
        assert torch.allclose(stats[:, 0], expected_stats[:, 0])
        for name, grad in gradients(loss, p).items():
            again = gradients(linear_cross_entropy(*rows)[0], p)[name]
            assert distance(grad, again) < 1e-12, name


def test_lk_alpha_rescues_a_student_that_overlaps_nowhere() -> None:
    """An acceptance of exp(-200) is 0 in float32: the loss would be inf, its gradient NaN."""
    teacher_logits = torch.zeros(1, 4)
    teacher_logits[0, 1] = 300.0
    z = torch.tensor([[200.0, 0.0, 0.0, 0.0]], requires_grad=True)
    loss, _ = lossy(z, teacher_logits, "lk_alpha", top_k=1)
    (grad,) = torch.autograd.grad(loss, z)
    assert loss.item() == pytest.approx(200.0)
    assert grad.tolist()[0] == pytest.approx([1.0, -1.0, 0.0, 0.0])
    (vanished,) = torch.autograd.grad(lossy(z, teacher_logits, "tv", top_k=1)[0], z)
    assert float(vanished.abs().max()) < 1e-30


def test_what_the_token_map_drops_is_rejected() -> None:
    """Renormalised over the kept tokens, a pruned head would look better than it decodes."""
    teacher_logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    kept = torch.tensor([2, 0])
    student = torch.tensor([[1 / 3, 2 / 3]], dtype=torch.float64).log()
    assert lossy(student, teacher_logits, "tv", token_map=kept)[0].item() == pytest.approx(0.4)
    alpha = lossy(student, teacher_logits, "lk_alpha", token_map=kept)[0].item()
    assert alpha == pytest.approx(-torch.tensor(0.6).log().item())
    assert lossy(student, teacher_logits, "soft", token_map=kept)[0].item() == pytest.approx(0.0)


@pytest.mark.parametrize("kind", BOUNDED)
def test_rows_whose_teacher_keeps_nothing_do_not_poison_the_rest(kind: str) -> None:
    """The logarithm of an acceptance of 0 is -inf; one such row would end the run."""
    teacher_logits = torch.tensor([[9.0, 0.0, 1.0], [0.0, 9.0, 1.0]])
    z = torch.randn(2, 2, generator=torch.Generator().manual_seed(2)).requires_grad_()
    kept = torch.tensor([1, 2])
    loss, stats = lossy(z, teacher_logits, kind, token_map=kept, top_k=1)
    (grad,) = torch.autograd.grad(loss, z)
    alone, _ = lossy(z[1:], teacher_logits[1:], kind, token_map=kept, top_k=1)
    assert loss.item() == pytest.approx(alone.item() + (kind == "tv"))
    assert grad[0].tolist() == [0.0, 0.0] and float(grad[1].abs().min()) > 0
    assert bool(stats.isfinite().all())


def test_hits_of_labels_that_the_token_map_drops() -> None:
    """A dropped label is never a hit, though its row counts; index -1 would hit the last token."""
    z = torch.tensor([[0.0, 1.0, 2.0]]).repeat(4, 1)
    labels, kept = torch.tensor([9, 7, 3, 0]), torch.tensor([7, 3, 9])
    _, stats = lossy(z, torch.zeros(4, 10), "soft", token_map=kept, labels=labels)
    assert stats[0, 1:].tolist() == [1.0, 3.0]


def test_ignored_rows_leave_no_trace() -> None:
    """A prompt's tokens would be learned with the answer's if the mask were only for the labels."""
    p = problem()
    p |= {name: p[name].flatten() for name in ("labels", "row_weight")}
    keep = p["labels"] != IGNORE
    short = {**p, "hidden": p["hidden"][keep].detach().requires_grad_()}
    short["teacher"] = Teacher(p["teacher"].hidden[keep], p["teacher"].output)
    short |= {name: p[name][keep] for name in ("labels", "row_weight")}
    for kind in KINDS:
        loss, stats = soft_loss(p, 8, kind=kind)
        expected, expected_stats = soft_loss(short, kind=kind)
        grads, fewer = gradients(loss, p), gradients(expected, short)
        assert not grads["hidden"][~keep].any()
        assert distance(grads["hidden"][keep], fewer["hidden"]) < 1e-12
        assert distance(grads["weight"], fewer["weight"]) < 1e-12
        assert torch.allclose(stats, expected_stats)


@pytest.mark.parametrize("num_rows", [0, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_no_valid_label_gives_zero_not_nan(num_rows: int, kind: str) -> None:
    """A micro-batch of prompts alone must count nothing and move nothing."""
    p = problem(num_rows=num_rows)
    p["labels"].fill_(IGNORE)
    loss, stats = soft_loss(p, kind=kind)
    assert loss.item() == 0.0 and not stats.any()
    assert not any(grad.any() for grad in gradients(loss, p).values())


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_decides_the_dtype_of_the_products(kind: str) -> None:
    """Both sides' products must run in bfloat16, the softmax above them in float32."""
    p = problem(num_rows=200, size=24, dtype=torch.float32)
    loss, _ = soft_loss(p, kind=kind)
    expected = gradients(loss, p)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = soft_loss(p, 64, kind=kind)
        grads = gradients(found, p)
    assert found.dtype == torch.float32
    assert 0 < distance(found.detach(), loss.detach()) < 2e-2
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        # Rounding moves tokens across s = t, where all but KL have a jump in the gradient.
        assert 1e-5 < distance(grad, expected[name]) < 1e-1, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_on_both_sides(dtype: torch.dtype) -> None:
    """A teacher in bfloat16 is the usual case; its probabilities must not be narrow too."""
    p = problem(num_rows=64, size=16, dtype=dtype, finished=True)
    p["row_weight"] = p["row_weight"] * 1e-6  # 0 in float16 if it were multiplied in at once
    wide = {
        name: value.detach().double().requires_grad_(value.requires_grad)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in p.items()
    }
    expected, _ = reference(wide, kind="lk_lambda")
    found, _ = soft_loss(p, 16, kind="lk_lambda")
    assert distance(found.detach(), expected.detach()) < 2e-2
    grads = gradients(2.0**16 * found, p)
    for name, grad in gradients(2.0**16 * expected, wide).items():
        assert grads[name].dtype == dtype
        assert distance(grads[name], grad) < 3e-2, name


@pytest.mark.parametrize(
    ("hidden", "weight", "grad", "products"),
    [
        (True, True, True, 4),
        (True, False, True, 3),
        (False, True, True, 3),
        (False, False, True, 2),
        (True, True, False, 2),
    ],
)
def test_no_gradient_is_formed_that_nobody_needs(
    hidden: bool, weight: bool, grad: bool, products: int
) -> None:
    """Evaluation and frozen matrices would silently cost twice the work; so would a teacher's."""
    p = problem(num_rows=40)
    p["labels"] = p["labels"].clamp_min(0)
    p["hidden"].requires_grad_(hidden)
    p["weight"].requires_grad_(weight)
    p["teacher"].output.weight.requires_grad_()
    with torch.set_grad_enabled(grad), Watch() as watch:
        loss, stats = soft_loss(p, 10, kind="lk_lambda")
    assert watch.products == 4 * products
    assert loss.requires_grad == (grad and (hidden or weight))
    assert not stats.requires_grad
    if loss.requires_grad:
        loss.backward()
    assert p["teacher"].output.weight.grad is None


@pytest.mark.parametrize("token_map", [None, TOKEN_MAP], ids=["full", "pruned"])
@pytest.mark.parametrize("kind", KINDS)
def test_never_more_than_one_chunk_of_logits(kind: str, token_map: Tensor | None) -> None:
    """All of the teacher's logits are as many as all of the student's: neither may exist."""
    p = problem(num_rows=256, vocab=400, token_map=token_map)
    with Watch() as watch:
        loss, _ = soft_loss(p, 16, kind=kind, top_k=5 * (kind in BOUNDED))
        loss.backward()
    # without top_k, what is renormalised over the kept tokens needs no logits of the others
    alone = token_map is not None and kind not in BOUNDED
    assert watch.largest < 16 * 400 if alone else watch.largest == 16 * 400


@pytest.mark.parametrize("kind", KINDS)
def test_known_sums_spare_the_logits_of_tokens_that_are_not_kept(kind: str) -> None:
    """The base's whole matrix once per head instead of once: training at a third of the speed."""
    p = problem(num_rows=256, vocab=400, token_map=TOKEN_MAP)
    theirs = p["teacher"]
    p["teacher"] = replace(theirs, log_sum=log_sums(theirs.hidden, theirs.output, 1.0))
    with Watch() as watch:
        soft_loss(p, 16, kind=kind)[0].backward()
    assert watch.largest < 16 * 400


def test_shared_output_matrix_learns_as_student_only() -> None:
    """Where heads share the base's matrix, the teacher reads it too, and must not move it."""
    p = problem(size=6)
    matrix = p["weight"]
    p["teacher"] = Teacher(torch.randn(40, 6, dtype=torch.float64), Output(matrix))
    loss, _ = soft_loss(p, kind="soft")
    frozen = {**p, "teacher": Teacher(p["teacher"].hidden, Output(matrix.detach().clone()))}
    expected, _ = soft_loss(frozen, kind="soft")
    assert torch.equal(gradients(loss, p)["weight"], gradients(expected, frozen)["weight"])


def test_large_logits_stay_finite() -> None:
    """exp() of an unshifted logit overflows at 89, and a late shift loses the digits."""
    p = problem(num_rows=20, dtype=torch.float32)
    with torch.no_grad():
        p["weight"].mul_(15.0)
    assert (p["hidden"] @ p["weight"].T).max().item() > 89
    for kind in KINDS:
        expected, _ = reference(p, kind=kind)
        loss, _ = soft_loss(p, kind=kind)
        assert distance(loss.detach(), expected.detach()) < 1e-4
        for name, grad in gradients(loss, p).items():
            assert distance(grad, gradients(reference(p, kind=kind)[0], p)[name]) < 1e-3, name


def test_misuse_names_both_numbers() -> None:
    """A teacher of another batch or vocabulary would give a loss, only not the right one."""
    p = problem(num_rows=10)
    hidden, weight = p["teacher"].hidden, p["teacher"].output.weight
    pruned = Teacher(hidden, Output(weight), TOKEN_MAP)
    biased = Teacher(hidden, Output(weight, torch.ones(1)))
    narrow = Teacher(hidden, Output(weight[:, 1:]))
    for change, options, message in (
        ({}, {"kind": "kl"}, "one of soft, reverse_kl, jsd, tv, lk_alpha, lk_lambda, got 'kl'"),
        ({}, {"kind": "reverse_kl", "top_k": 4}, "top_k must be 0 for reverse_kl"),
        ({"teacher": Teacher(hidden[:9], Output(weight))}, {}, "teacher has 9 rows, hidden has 10"),
        ({"teacher": narrow}, {}, r"\(10, 8\) and weight \(37, 7\)"),
        ({"teacher": Teacher(hidden, Output(weight[1:]))}, {}, "the teacher's 36: token_map is"),
        ({"teacher": biased}, {}, r"teacher's bias has shape \(1,\)"),
        ({"teacher": pruned}, {}, r"token_map has shape \(11,\), weight has 37"),
        ({"labels": p["labels"][:4]}, {}, r"labels has shape \(4, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            soft_loss({**p, **change}, **{"kind": "soft", **options})
