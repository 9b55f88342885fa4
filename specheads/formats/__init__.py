"""Foreign formats, one module each: what it holds, how to write it, how to read it."""
