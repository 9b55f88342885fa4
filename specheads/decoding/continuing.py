"""Let a model that is being trained continue prompts, each with a limit and a seed of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transformers import PreTrainedModel

from specheads.decoding.stream import Job, PlainStream
from specheads.models.forward import undisturbed
from specheads.sampling import Sampler
from specheads.tree_support import tree_support


def continue_prompts(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    seeds: Sequence[int],
    *,
    temperature: float,
    eos_token_ids: Collection[int] = (),
    batch_size: int = 32,
) -> list[list[int]]:
    """Return what ``model`` writes after each prompt, an end of text included.

    In float32 an answer depends on its prompt, limit and seed alone, not on its neighbours. Modes
    and random generators are left as they were found.

    Args:
        model: any causal language model that can be decoded; it may be in training mode.
        prompts: token ids, none empty.
        limits: per prompt the most new tokens, at least 1; with the prompt they have to fit the
            model's context.
        seeds: per prompt, of its draws.
        temperature: 0 is greedy.
        eos_token_ids: tokens that end a text.
        batch_size: prompts that are continued together; 1 where the model takes no more.
    """
    jobs = [
        Job(list(ids), limit, seed, owner)
        for owner, (ids, limit, seed) in enumerate(zip(prompts, limits, seeds, strict=True))
    ]
    answers: list[list[int]] = [[] for _ in jobs]
    # those of like length are read together with the least padding
    waiting = sorted(jobs, key=lambda job: len(job.ids))
    with undisturbed(model):
        rows = batch_size if tree_support(model).kind == "tree" else 1
        stream = PlainStream(
            model, Sampler(temperature=temperature), eos_token_ids=eos_token_ids, batch_size=rows
        )
        while waiting or stream.free < rows:
            if waiting and stream.free >= min(-(-rows // 4), len(waiting)):
                num = stream.num_fitting(waiting)
                stream.add(waiting[:num])
                waiting = waiting[num:]
            if stream.free < rows:
                stream.step()
            for job, row in stream.take_ended():
                answers[job.owner] = row.new_tokens
    return answers
