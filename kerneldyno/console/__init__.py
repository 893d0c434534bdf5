"""What a person sees: progress on standard error; tables, JSON and CSV on standard output."""
