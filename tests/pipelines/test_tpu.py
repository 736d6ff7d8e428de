"""`strata doctor --tpu`: the study's training steps, compiled by a TPU's compiler where it is installed."""

from pathlib import Path

import pytest

from models.backends import jax_ahead
from models.backends.jax_ahead import Compiled, Step
from pipelines import reading, tpu

ROOT = Path(__file__).parents[2]
ahead = pytest.mark.skipif(jax_ahead.missing() is not None, reason=str(jax_ahead.missing()))


def test_every_model_at_every_scale_is_wanted_once() -> None:
    params = reading.load(ROOT)
    steps = tpu.wanted(params, "")
    assert {"mesa-140m", "hawk_mesa-1b", "swa-64-440m", "mesa-cg-5-440m"} <= set(steps)
    assert len(steps) == 27 + 10 + 6, "nine models at three scales, five windows at two, six numbers of steps at one"
    assert steps["mesa-1b"].scale["heads"] == 12 and steps["mesa-1b"].length == params.packing.sequence_length
    assert set(tpu.wanted(params, "mesa-cg-5-")) == {"mesa-cg-5-440m"}


def test_what_does_not_fit_is_tried_with_its_parameters_split(monkeypatch: pytest.MonkeyPatch) -> None:
    full, fits = (
        Compiled("RESOURCE_EXHAUSTED: that exceeds available HBM", 1.0),
        Compiled(None, 2.0, arguments=2**30, chosen={"mesa": "pallas"}),
    )
    asked = []

    def ask(topology, requests):
        asked.append(requests)
        return [full if step.fsdp == 1 and step.length > 9 else full if step.length > 99 else fits for step in requests]

    monkeypatch.setattr(jax_ahead, "ask", ask)
    steps = {name: Step({}, {}, 8, length=length) for name, length in (("small", 1), ("large", 10), ("huge", 100))}
    found = {finding.what: finding for finding in tpu.examine(steps, "v5e:2x4")}
    assert [step.fsdp for step in asked[1]] == [8, 8] and all(step.rematerialise for step in asked[1])
    assert found["small"].found == "compiles in 2 s; 1.0 of 15.8 GiB a chip; mesa by pallas" and found["small"].fix is None
    assert "split over 8 chips (fsdp: 8)" in found["large"].found and found["large"].fix is None
    assert "does not fit" in found["huge"].found and found["huge"].fix


def test_a_mistaken_topology_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="no figures for a TPU 'v9q'; there are for v5e"):
        tpu.show(ROOT / "pipelines" / "nano", "v9q:2x2", "")
    with pytest.raises(ValueError, match="--only 'none' is in no model at a scale"):
        tpu.show(ROOT / "pipelines" / "nano", "v5e:2x2", "none")


@ahead
def test_nano_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert tpu.show(ROOT / "pipelines" / "nano", "v5e:2x2", "gla") == 0
    assert "linear_attention by pallas" in capsys.readouterr().out
