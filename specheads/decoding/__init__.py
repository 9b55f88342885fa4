"""Decoding: the plain loop, the tree loop that must equal it, and the door for generate()."""
