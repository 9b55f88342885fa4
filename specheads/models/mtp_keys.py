"""MTP heads while decoding: placeholder."""
