"""The machine: processes, files, signals, the terminal, and the errors that end a program."""

__version__ = "0.1.0"
