"""Trees of guesses, the masks that let a model read them at once, and the cache behind them."""
