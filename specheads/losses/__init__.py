"""Losses that never hold all logits at once: cross-entropy and distances to a teacher."""

from specheads.losses.cross_entropy import IGNORE, count_valid, shift_labels

__all__ = ["IGNORE", "count_valid", "shift_labels"]
