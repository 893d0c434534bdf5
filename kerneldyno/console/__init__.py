"""What a person sees: progress on standard error; tables, JSON and CSV on standard output."""

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 plus the number of SIGINT, as shells count."""
