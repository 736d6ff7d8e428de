"""What analyze makes of a study's results: its tables, its figures, its page."""
