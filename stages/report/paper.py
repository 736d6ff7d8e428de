"""What the papers print, under their own names, and what those names are in a study.

stages/data/<paper>.csv holds a figure a row: where it is printed, of which model at which scale and budget, and what it is (`table`, `metric`).
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"
MEAN = "AVG"  # of perplexities over the paper's sets

# What a study may call a scale, model, set or task -> the paper's own name, where the two differ by more than case and separators.
NAMES = {
    "mesanet": {
        "140m": "145M", "440m": "400M", "940m": "1B", "mlstm": "xLSTM", "attention": "Transformer", "mha": "Transformer",
        "slimpajama": "SLIM", "slimpajama_validation": "SLIM", "lambada": "LMB", "lambada_openai": "LMB", "wikitext": "WIKI",
        "wikitext2": "WIKI", "govreport": "GOV", "qasper": "QASP",
        "hellaswag": "Hella", "race_middle": "RACE-M", "race_high": "RACE-H", "winogrande": "Wino", "arc_easy": "ARC-E", "arc_challenge": "ARC-C",
        "openbookqa": "OBQA", "storycloze": "SC", "squad_1000": "SQUAD", "drop_1000": "DROP", "triviaqa": "TQA", "natural_questions": "NQ",
        "cycle_letters_in_word": "cycle_letters", "mid_word_2_anagrams": "mid_word_2", "wmt14_fr_en": "FR-EN", "wmt16_de_en": "DE-EN",
        "wmt16_ro_en": "RO-EN",
    },
    "palimpsa": {
        "170m_20l": "170M", "170m_30l": "170M", "760m_23l": "760M", "760m_38l": "760M", "transformer": "Transformer++", "gated_deltanet": "GDN",
        "palimpsa_d": "D scratch", "palimpsa_m": "M scratch", "palimpsa_d_plain": "D w/o Meta", "palimpsa_m_plain": "M w/o Meta",
        "palimpsa_d_tuned": "D fine-tuned", "palimpsa_m_tuned": "M fine-tuned", "lambada": "LMB", "lambada_openai": "LMB", "hellaswag": "Hella",
        "winogrande": "Wino", "arc_easy": "ARC-E", "arc_challenge": "ARC-C",
    },
}  # fmt: skip

# A printed mean of scores -> what it is over, by the paper's names.
MEANS: dict[str, dict[str, tuple[str, ...]]] = {
    "mesanet": {
        "global": ("LMB", "Hella", "RACE-M", "RACE-H"),
        "local": ("PIQA", "Wino", "ARC-E", "ARC-C", "SIQA", "BOOLQ", "OBQA", "SC"),
        "recall": ("SWDE", "SQUAD", "FDA", "TQA", "NQ", "DROP"),
        "scrambling": ("cycle_letters", "mid_word_2"),
        "translation": ("FR-EN", "DE-EN", "RO-EN"),
    },
    "palimpsa": {"accuracy": ("LMB", "PIQA", "Hella", "Wino", "ARC-E", "ARC-C", "SIQA")},
}

# How a paper normalises the options of a multiple choice: MesaNet by tokens throughout (appendix N), Palimpsa as lm-eval does by task.
NORMALISATION = {"mesanet": {}, "palimpsa": {"PIQA": "bytes", "Hella": "bytes", "ARC-C": "bytes"}}
OTHERWISE = {"mesanet": "tokens", "palimpsa": "none"}

NEEDLES = 9  # types of key and value that MesaNet's scores of needles are means over

Figure = dict[str, Any]


def printed(paper: str) -> list[Figure]:
    """Rows source, table, scale, budget, model, metric, shots, length, setting, value, std; shots, length and std are None where they are not said."""
    with (DATA / f"{paper}.csv").open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    kinds = {"shots": int, "length": int, "value": float, "std": float}
    return [row | {name: kind(row[name]) if row[name] else None for name, kind in kinds.items()} for row in rows]


def plain(name: str) -> str:
    """A name without case and separators."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


class Names:
    """From a study's names to a paper's, both plain."""

    def __init__(self, paper: str, own: dict[str, str]) -> None:
        self.known = {plain(ours): plain(theirs) for ours, theirs in (NAMES[paper] | own).items()}

    def __call__(self, name: str) -> str:
        return self.known.get(plain(name), plain(name))


def rule(paper: str, metric: str) -> str:
    """The normalisation under which a paper scores a multiple choice."""
    return NORMALISATION[paper].get(metric, OTHERWISE[paper])
