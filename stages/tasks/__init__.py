"""Downstream tasks: items in three schemas, four kinds of scoring, generated items. docs/tasks.md tells how one is added."""
