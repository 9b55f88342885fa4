"""The training loop, its engines, objectives, checkpoints and plans."""
