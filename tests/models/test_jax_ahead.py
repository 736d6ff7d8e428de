"""The JAX trainer's own step at the MesaNet study's smallest scale, compiled for real TPUs, one of each family and Mesa's over a slice."""

from pathlib import Path

import pytest
import yaml

from models.backends import jax_ahead
from models.backends.jax_ahead import Step

STUDY = yaml.safe_load((Path(__file__).parents[2] / "params.yaml").read_text())
FAMILIES = {
    "transformer": "attention",
    "gla": "linear_attention",
    "gated_deltanet": "delta_rule",
    "xlstm": "mlstm",
    "hawk": "rg_lru",
    "mesa": "mesa",
}
PALIMPSA = {"layer": "palimpsa_d"}
ahead = pytest.mark.skipif(jax_ahead.missing() is not None, reason=str(jax_ahead.missing()))


def compiled(topology: str, model: dict, **options) -> jax_ahead.Compiled:
    (found,) = jax_ahead.ask(topology, [Step(model, STUDY["scales"]["140m"], 50257, **options)])
    assert found.error is None, found.error
    assert found.memory < jax_ahead.chip(topology).hbm
    return found


@ahead
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_of_every_family_compiles(name: str) -> None:
    found = compiled("v5e:2x2", STUDY["models"][name])
    assert found.chosen[FAMILIES[name]] == "pallas" and found.kernels >= 2


@ahead
@pytest.mark.slow
def test_a_step_of_palimpsa_compiles() -> None:
    assert compiled("v5e:2x2", PALIMPSA, segments=True).chosen["palimpsa"] == "pallas"


@ahead
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2", "v6e:2x4"])
def test_a_step_of_mesa_compiles_over_a_slice(topology: str) -> None:
    """Rows and parameters split over eight chips."""
    assert compiled(topology, STUDY["models"]["mesa"], fsdp=8).chosen["mesa"] == "pallas"


@ahead
def test_a_small_step_compiles_over_two_axes() -> None:
    scale = {"layers": 2, "width": 256, "heads": 2, "key_size": 128, "mlp": 512}
    request = Step(STUDY["models"]["mesa"], scale, 512, length=256, fsdp=2, segments=True)
    (found,) = jax_ahead.ask("v5e:2x2", [request])
    assert found.error is None and found.chosen["mesa"] == "pallas", found.error
