"""The base models, the heads and draft models on them, and their files."""
