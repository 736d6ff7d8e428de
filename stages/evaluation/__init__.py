"""Evaluation, an idea a file: what is asked (parameters), sequences of text, the model that scores them, and the kinds of unit."""
