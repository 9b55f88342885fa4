"""Answers that a base model, here or behind an endpoint, writes to the prompts of a dataset."""
