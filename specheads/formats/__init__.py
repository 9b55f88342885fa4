"""Foreign formats: one module each, and one entry each in the table of ``write.py``."""
