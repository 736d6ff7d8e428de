"""The studies that the repository ships beside the root's: well formed, and of the sizes that their papers give."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.cells import model_of
from pipelines.params import cells
from pipelines.reading import load

PIPELINES = Path(__file__).parents[2] / "pipelines"
STUDIES = sorted(path.parent.name for path in PIPELINES.glob("*/params.yaml"))
MILLIONS = {
    "palimpsa": {"palimpsa_d": 172, "palimpsa_m": 170, "transformer": 166},
    "palimpsa-760m": {"palimpsa_d": 776, "palimpsa_m": 785, "gated_deltanet": 756},
}


@pytest.mark.parametrize("study", STUDIES)
def test_every_study_is_well_formed_and_bears_its_folders_name(study: str) -> None:
    params = load(PIPELINES / study)
    assert params.study == study
    assert all(model_of(params, cell).trainable is None for cell in cells(params))


@pytest.mark.parametrize("study", MILLIONS)
def test_palimpsas_models_have_the_papers_sizes(study: str) -> None:
    params = load(PIPELINES / study)
    found = {cell.model: round(model_of(params, cell).parameters / 1e6) for cell in cells(params)}
    assert {name: found[name] for name in MILLIONS[study]} == MILLIONS[study]
