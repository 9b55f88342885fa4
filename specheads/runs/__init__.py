"""The folder of a run, its lines, its metrics, and Weights & Biases."""
