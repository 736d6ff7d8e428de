"""Floor 4: what is built, where it runs, what is recorded."""
