"""Which models can verify a tree: known reasons against it, and a self-test on the actual model."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from specheads.kv_cache import TreeCache
from specheads.tree import Tree
from specheads.tree_mask import SUPPORTED_ATTENTION, tree_attention

# their attention builds on its own idea of where a key stands, where no mask function reaches, and
# a short self-test would not show it (gpt_neo's local window is 256 tokens wide)
_UNSUPPORTED_TYPES = ("gpt_neo",)


def check_tree_support(model: PreTrainedModel) -> None:
    """Refuse models that cannot verify a tree; remembers those that passed.

    Beside known reasons, a self-test: the logits along both branches of a small tree must be those
    of ordinary forward passes over each branch. It catches ALiBi, recurrent layers, custom code.

    Raises:
        ValueError: with the reason.
    """
    attention = model.config.get_text_config()._attn_implementation
    if _passed.get(model) == attention:
        return
    name = type(model).__name__
    if model.training:
        raise ValueError(f"{name} is in training mode; call model.eval() before decoding")
    if attention not in SUPPORTED_ATTENTION:
        options = ", ".join(SUPPORTED_ATTENTION)
        raise ValueError(f"{name} uses {attention} attention; tree attention needs {options}")
    if getattr(model, "_is_stateful", False) or _has_linear_attention(model):
        raise ValueError(f"{name} keeps a recurrent state, which cannot branch into a tree")
    if model.config.get_text_config().model_type in _UNSUPPORTED_TYPES:
        raise ValueError(f"{name} masks keys by slot in its own code; a tree would be wrong there")
    error, spread = _self_test(model)
    # rounding differs with the shapes; a wrong mask or position moves logits by their own spread
    limit = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.2
    if not error <= limit * spread:
        raise ValueError(
            f"{name} fails the tree self-test: logits in a tree differ from linear ones by "
            f"{error:.2g} (limit {limit * spread:.2g}); it ignores masks or positions"
        )
    _passed[model] = attention


_passed: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()


def _has_linear_attention(model: PreTrainedModel) -> bool:
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return any("attention" not in kind or kind == "linear_attention" for kind in kinds)


@torch.no_grad()
def _self_test(model: PreTrainedModel) -> tuple[float, float]:
    """Return the largest difference between tree and linear logits, and the logits' spread."""
    tree = Tree.from_choices([(0,), (1,), (0, 0), (1, 0), (1, 0, 0)]).to(model.device)
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.randint(vocab_size, (1, 5 + tree.num_nodes), generator=generator).to(model.device)
    prompt, nodes = ids[:, :5], ids[:, 5:]
    cache = TreeCache()
    positions = torch.arange(5, device=model.device)[None]
    model(input_ids=prompt, position_ids=positions, past_key_values=cache, use_cache=True)
    with tree_attention(tree):
        in_tree = model(
            input_ids=nodes,
            position_ids=5 + tree.depths[None],
            past_key_values=cache,
            use_cache=True,
        ).logits.float()
    error = spread = 0.0
    for path in tree.paths:
        path = path[path >= 0]
        linear = model(input_ids=torch.cat([prompt, nodes[:, path]], 1), use_cache=False)
        logits = linear.logits[:, 5:].float()
        error = max(error, float((in_tree[:, path] - logits).abs().max()))
        spread = max(spread, float(logits.std(-1).max()))
    return error, spread
