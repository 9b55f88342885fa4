"""The kinds of heads there are. What takes heads of any kind takes this."""

from __future__ import annotations

from specheads.models.heads import MedusaHeads
from specheads.models.mtp import MtpHeads

Heads = MedusaHeads | MtpHeads
