"""specheads: train and decode with models that emit several tokens per forward pass."""

from specheads.registration import register

__version__ = "0.1.0"

register()
