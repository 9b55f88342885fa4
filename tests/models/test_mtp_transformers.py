"""A chain of sequential MTP heads against what transformers' own MTP machinery drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from specheads.attention.tree import Tree
from specheads.drafters.heads import heads_drafter
from specheads.models.mtp import MtpHeads, block_config
from specheads.models.output import output_layer
from tests import zoo
from tests.models.test_mtp_sequential import run

Drafted = tuple[list[int], list[int]]  # a text up to the root, and the guesses behind it
THEIRS = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "mtp_block": "block",
    "post_norm": "norm",
}


@pytest.mark.parametrize(
    ("kind", "noise", "hidden_first"),
    [
        ("llama", 0.05, False),
        ("llama", 0.05, True),
        ("deepseek_v3", 0.1, False),
        ("deepseek_v3", 0.12, True),
    ],
)
@torch.no_grad()
def test_a_chain_is_what_transformers_drafts(
    kind: str, noise: float, hidden_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents heads trained and exported here from guessing otherwise where they are served."""
    base = zoo.build(kind, **_in_float64(kind)).double()
    base.config.num_mtp_layers = 3
    base.config.mtp_hidden_states_first = hidden_first
    # a text is then mostly a walk from token to token, and heads that look at the token find it
    for name, parameter in base.get_decoder().layers.named_parameters():
        if "norm" not in name:
            parameter.mul_(0.3)
    base.get_input_embeddings().weight.mul_(4)
    heads = MtpHeads(
        3, block_config(base.config), zoo.VOCAB, variant="sequential", hidden_first=hidden_first
    )
    zoo.redraw(heads, std=noise)
    first = 32 if hidden_first else 0  # of the columns that read the token
    for i in range(3):
        heads.layer(i).eh_proj.weight[:, first : first + 32] += 3 * torch.eye(32)
    heads = heads.double().eval()
    theirs = MtpModel(base, 3).double().eval()
    for i, layer in enumerate(theirs.layers):
        for their_name, name in THEIRS.items():
            state = getattr(heads.layer(i), name).state_dict()
            getattr(layer, their_name).load_state_dict(state)
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda *args, **kwargs: theirs)
    drafted: list[Drafted] = []
    get_candidates = MTPCandidateGenerator.get_candidates

    def noted(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = get_candidates(self, input_ids, *args, **kwargs)
        text, both = input_ids[0].tolist(), found[0][0].tolist()
        if len(both) > len(text):  # in its first call it has nothing to draft from
            drafted.append((text, both[len(text) :]))
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noted)
    prompt = torch.randint(0, zoo.VOCAB, (1, 9))
    written = base.generate(prompt, use_mtp=True, max_new_tokens=40, do_sample=False)
    chain = heads_drafter(base, heads, output_layer(base), Tree.chain(3))
    watched, lengths = run(base, chain, [prompt], max_new_tokens=40)
    ours = [(texts[0], guesses.tokens[0, 1:].tolist()) for texts, guesses in watched.proposed]
    assert drafted == ours
    assert watched.texts[0][:49] == written[0].tolist()
    assert min(lengths) < 3 < max(lengths), "their cache is kept in one case and cut in the other"


def _in_float64(kind: str) -> dict[str, Any]:
    """Return the setting that lets experts run in it."""
    return {"experts_implementation": "eager"} if kind == "deepseek_v3" else {}
