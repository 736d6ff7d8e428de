"""`training.internals` of params.yaml: whose keys it reaches, and what a training is then given."""

import copy
from pathlib import Path

import pytest

from pipelines import workspace
from pipelines.cells import makers, specs, version_table
from pipelines.params import Params
from pipelines.reading import parse, read
from stages.evaluation.parameters import VALIDATION

ROOT = Path(__file__).parents[2]


def study(internals: dict[str, int] | None = None) -> Params:
    params = copy.deepcopy(read(ROOT / "pipelines" / "nano"))
    params["training"] |= {} if internals is None else {"internals": internals}
    return parse(params)


def test_only_trainings_with_something_to_see_have_it_in_their_specs():
    table = version_table()
    before, after = specs(study(), table), specs(study({"every": 10}), table)
    assert all("internals" not in spec.parameters for (stage, _), spec in before.items() if stage == "train")
    moved = {cell for (stage, cell), spec in after.items() if stage == "train" and spec.key != before[stage, cell].key}
    assert moved == {"mesa-tiny-1m", "mesa-cg-2-tiny-1m"}
    spec = after["train", "mesa-tiny-1m"]
    assert spec.parameters["internals"] == {"every": 10} and spec.parameters["internals_code"] == table["tasks"]["internals"]
    assert workspace.inputs(spec, "mesa-tiny-1m")[VALIDATION] == Path("packed/validation")
    assert makers(after)[spec.inputs[VALIDATION]][1] == "validation"


def test_the_version_of_what_is_looked_at_reaches_these_trainings():
    table = version_table()
    raised = table | {"tasks": table["tasks"] | {"internals": 2}}
    before, after = (specs(study({"every": 10}), versions) for versions in (table, raised))
    moved = {cell for (stage, cell), spec in after.items() if stage == "train" and spec.key != before[stage, cell].key}
    assert moved == {"mesa-tiny-1m", "mesa-cg-2-tiny-1m"}


@pytest.mark.parametrize("name", ["palimpsa", "palimpsa-760m"])
def test_the_palimpsa_studies_look_while_they_train(name):
    found = specs(parse(copy.deepcopy(read(ROOT / "pipelines" / name))), version_table())
    looking = {cell.split("-")[0] for (stage, cell), spec in found.items() if stage == "train" and "internals" in spec.parameters}
    assert looking and all(cell.startswith("palimpsa") or cell == "mesa" for cell in looking)


def test_a_mistake_is_one_sentence():
    with pytest.raises(ValueError, match="training.internals.every"):
        study({"every": 0})
