import pytest

from stages import schemas
from stages.analyze import run
from stages.spec import Context
from tests.stages.made_up_study import inputs_of, spec_of


@pytest.fixture
def analyzed(tmp_path):
    """A function: cells, whose results are under tmp_path, to (table name -> rows, the report's page)."""

    def analyze(cells, **analysis):
        spec = spec_of(cells, **{"bootstrap": 20, **analysis})
        out = tmp_path / "analysis"
        out.mkdir(exist_ok=True)
        run(spec, out, inputs_of(tmp_path, spec), Context())
        rows = {path.stem: schemas.read(path, schemas.FREE).to_pylist() for path in (out / "tables").iterdir()}
        return rows, (out / "report.html").read_text()

    return analyze
