"""Which guesses are kept: exact acceptance, rejection of sampled guesses, lossy rules, noise."""
