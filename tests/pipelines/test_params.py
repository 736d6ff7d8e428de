"""A wrong params.yaml never starts work: one sentence names the key, what was found and what is allowed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.params import cells
from pipelines.reading import load, parse, read

ROOT = Path(__file__).parents[2]
NANO = ROOT / "pipelines" / "nano"


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(params: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for part in parents:
            params = params[part]
        params[last] = value

    return change


def drop(path: str) -> Callable[[dict[str, Any]], None]:
    def change(params: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for part in parents:
            params = params[part]
        del params[last]

    return change


def tuned(init: Any, model: str = "tuned", layer: dict[str, Any] | None = None, **beside: Any) -> Callable[[dict[str, Any]], None]:
    """A cell `tuned-tiny-1m` (a second one too, where `model` names it) that starts from another."""

    def change(params: dict[str, Any]) -> None:
        params["models"][model] = {**(layer or {"layer": "gla"}), "init_from": init, **beside}
        if model not in params["grid"]["models"]:
            params["grid"]["models"] = [*params["grid"]["models"], model]
        params["learning_rates"][model] = {"tiny": {"1m": 1e-3}}

    return change


def both(*changes: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    return lambda params: [change(params) for change in changes] and None


REPLACE = {"count": 1, "by": "memory_window", "layer": {"layer": "mesa"}}

V5P = {"kind": "tpu", "flops": 4.59e14, "memory": 95, "cost": 4.2, "utilization": 0.45}
TPU = {"accelerator": "v5p"}

# what is changed -> words that the sentence must hold
MISTAKES: dict[str, tuple[Callable[[dict[str, Any]], None], list[str]]] = {
    "unknown key": (put("gird", {}), ["gird", "not a parameter", "'grid'"]),
    "unknown key inside": (put("training/warmup_step", 20), ["training.warmup_step", "'warmup_steps'"]),
    "unknown key deep inside": (put("training/optimizer/beta3", 0.9), ["training.optimizer.beta3", "beta1"]),
    "missing table": (drop("packing"), ["packing", "is missing"]),
    "missing value": (drop("training/batch"), ["training.batch", "is missing"]),
    "null grid": (put("grid", None), ["grid", "null"]),
    "null list": (put("grid/models", None), ["grid.models", "null"]),
    "grid as text": (put("grid/models", "mesa"), ["grid.models", "'mesa'", "list"]),
    "empty grid": (put("grid/scales", []), ["grid.scales", "empty", "tiny"]),
    "half-empty group": (put("references/models", ["swa"]), ["references.scales", "empty"]),
    "unknown model": (put("grid/models", ["transformer", "messa"]), ["grid.models", "'messa'", "'mesa'"]),
    "unknown scale": (put("grid/scales", ["tinny"]), ["grid.scales", "'tinny'", "'tiny'"]),
    "unknown budget": (put("grid/budgets", ["2m"]), ["grid.budgets", "'2m'", "1m"]),
    "cell twice": (put("grid/models", ["gla", "gla"]), ["gla-tiny-1m", "twice"]),
    "cell in two groups": (put("sweep/models", ["mesa"]), ["mesa-tiny-1m", "grid", "sweep"]),
    "unknown layer": (put("models/gla", {"layer": "glaa"}), ["models.gla", "'glaa'", "'gla'"]),
    "layer missing": (put("models/gla", {"steps": 3}), ["models.gla", "layer"]),
    "unknown option": (put("models/mesa", {"layer": "mesa", "stesp": 30}), ["models.mesa", "'stesp'", "'steps'"]),
    "option of a wrong type": (put("models/mesa", {"layer": "mesa", "steps": "many"}), ["models.mesa", "steps", "'many'"]),
    "negative steps": (put("models/mesa", {"layer": "mesa", "steps": -1}), ["models.mesa", "-1"]),
    "model is no table": (put("models/gla", "gla"), ["models.gla", "'gla'", "dictionary"]),
    "bad name": (put("models/My Model", {"layer": "gla"}), ["models.My Model", "small letters"]),
    "name that escapes": (put("models/..", {"layer": "gla"}), ["models...", "small letters"]),
    "zero width": (put("scales/tiny/width", 0), ["scales.tiny.width", "0", "greater than 0"]),
    "fractional heads": (put("scales/tiny/heads", 1.5), ["scales.tiny.heads", "1.5"]),
    "odd key size": (put("scales/tiny/key_size", 31), ["models.", "scales.tiny", "31"]),
    "depth no multiple of the pattern": (put("scales/tiny/layers", -4), ["scales.tiny.layers", "-4"]),
    "budget below a step": (put("budgets/1m/tokens", 100), ["budgets.1m.tokens", "100", "4096"]),
    "budget as text": (put("budgets/1m/tokens", "lots"), ["budgets.1m.tokens", "'lots'"]),
    "warm-up longer than the run": (put("training/warmup_steps", 1000), ["training.warmup_steps", "1000", "244"]),
    "missing learning rate": (drop("learning_rates/gla/tiny/1m"), ["learning_rates.gla.tiny.1m", "missing", "gla-tiny-1m"]),
    "learning rate of an unknown model": (put("learning_rates/glu", {"tiny": {"1m": 0.1}}), ["learning_rates", "'glu'", "'gla'"]),
    "learning rate of an unknown scale": (put("learning_rates/gla/tinny", {"1m": 0.1}), ["learning_rates.gla", "'tinny'", "'tiny'"]),
    "learning rate of an unknown budget": (put("learning_rates/gla/tiny/2m", 0.1), ["learning_rates.gla.tiny", "'2m'", "1m"]),
    "negative learning rate": (put("learning_rates/gla/tiny/1m", -0.1), ["learning_rates.gla.tiny.1m", "-0.1"]),
    "learning rate without source": (put("learning_rates/gla/tiny/1m", {"rate": 0.1}), ["learning_rates.gla.tiny.1m", "source", "missing"]),
    "unknown vocabulary": (put("vocabulary", {"kind": "gpt3"}), ["vocabulary", "gpt3", "gpt2"]),
    "text for the shipped vocabulary": (put("vocabulary", {"kind": "gpt2", "megabytes": 8.0}), ["vocabulary", "megabytes", "bpe"]),
    "no training source": (put("data/sources/public-domain/role", "evaluation"), ["data.sources", "training"]),
    "unknown role": (put("data/sources/public-domain/role", "train"), ["data.sources.public-domain.role", "'train'", "training"]),
    "unpinned source": (put("data/sources/public-domain/pin", None), ["data.sources.public-domain.pin", "lock-data"]),
    "malformed pin": (put("data/sources/public-domain/pin", "md5:1"), ["data.sources.public-domain", "pin"]),
    "bad policy": (put("training/on_nonfinite", "ignore"), ["training.on_nonfinite", "'ignore'", "rollback"]),
    "setting of nothing": (put("evaluation/settings/odd", {"stesp": 3}), ["evaluation.settings.odd", "stesp"]),
    "setting that a layer refuses": (
        put("evaluation/settings/odd", {"criterion": "relative"}),
        ["evaluation.settings.odd", "'relative'", "'r0'", "mesa"],
    ),
    "text set of a taken name": (
        lambda params: params["data"]["sources"].update(validation=params["data"]["sources"]["public-domain"] | {"role": "evaluation"}),
        ["data.sources.validation", "another"],
    ),
    "headline of nothing": (put("analysis/headline", "vallidation"), ["analysis.headline", "'vallidation'", "'validation'"]),
    "headline that is no text set": (put("analysis/headline", "public-domain"), ["analysis.headline", "'public-domain'"]),
    "no lengths": (put("evaluation/lengths", []), ["evaluation.lengths"]),
    "a scale that counts as none": (put("analysis/same_scale", {"tiny": "tinny"}), ["analysis.same_scale", "'tinny'", "'tiny'"]),
    "solver settings at no length": (put("evaluation/settings_lengths", [300]), ["evaluation", "settings_lengths has 300"]),
    "baseline outside the grid": (put("analysis/baseline", "mamba2"), ["analysis.baseline", "'mamba2'"]),
    "worker of no scale": (put("cluster/workers/huge", {"cpus": 2}), ["cluster.workers", "'huge'", "tiny"]),
    "store that cannot be written to": (
        put("cluster/storage", "https://host/store"),
        ["cluster.storage", "https://host/store", "s3://bucket"],
    ),
    "store with a password": (put("cluster/storage", "s3://me:secret@host/store"), ["cluster.storage", "password", "environment"]),
    "unknown accelerator": (
        put("cluster/workers/default", {"cpus": 2, "accelerator": "h100"}),
        ["cluster.workers.default.accelerator", "'h100'", "laptop"],
    ),
    "accelerator of an alternative": (
        put("cluster/workers/default", [{"cpus": 2}, {"accelerator": "v5p"}]),
        ["cluster.workers.default.1.accelerator", "'v5p'", "laptop"],
    ),
    "no alternatives": (put("cluster/workers/default", []), ["cluster.workers.default"]),
    "unknown key of an alternative": (put("cluster/workers/default", [{"cpu": 2}]), ["cluster.workers.default.0.cpu", "'cpus'"]),
    "unknown slice": (put("cluster/workers/tiny", TPU | {"topology": "v5p-15"}), ["cluster.workers.tiny.topology", "'v5p-15'", "v5p-16"]),
    "slice of processors": (
        put("cluster/workers/tiny", {"accelerator": "laptop", "topology": "2x2"}),
        ["cluster.workers.tiny.topology", "'2x2'", "TPU"],
    ),
    "slice of another size": (
        both(put("accelerators/v5p", V5P), put("cluster/workers/tiny", TPU | {"topology": "2x2x2", "count": 4})),
        ["cluster.workers.tiny.count", "4", "8 chips"],
    ),
    "uneven fsdp": (
        both(put("accelerators/v5p", V5P), put("cluster/workers/tiny", TPU | {"topology": "2x2x2", "fsdp": 3})),
        ["cluster.workers.tiny.fsdp", "3", "8 chips"],
    ),
    "growth without number": (put("cluster/grows", [{"cpus": 8}]), ["cluster.grows.0.nodes", "missing"]),
    "growth of nothing known": (
        put("cluster/grows", [{"nodes": 2, "cpus": 8, "accelerator": "b200"}]),
        ["cluster.grows.0.accelerator", "'b200'"],
    ),
    "image and upload": (both(put("cluster/image", "strata:1"), put("cluster/code", "upload")), ["cluster.image", "cluster.code"]),
    "utilization beyond 1": (put("accelerators/laptop/utilization", 30), ["accelerators.laptop.utilization", "30"]),
    "infinite cost": (put("accelerators/laptop/flops", float("inf")), ["accelerators.laptop.flops", "finite"]),
    "outputs": (put("outputs", "links"), ["outputs", "'links'", "pointers"]),
    "start from no model": (tuned({"budget": "1m"}), ["models.tuned.init_from.model", "missing"]),
    "start as text": (tuned("gla"), ["models.tuned.init_from", "'gla'", "dictionary"]),
    "start from an unknown model": (tuned({"model": "glaa"}), ["models.tuned.init_from.model", "'glaa'", "'gla'"]),
    "start from an unknown budget": (tuned({"model": "gla", "budget": "2m"}), ["models.tuned.init_from.budget", "'2m'", "1m"]),
    "start with an unknown key": (tuned({"model": "gla", "dorp": []}), ["models.tuned.init_from.dorp", "'drop'"]),
    "start from a cell that is not selected": (tuned({"model": "mamba2"}), ["models.tuned", "mamba2-tiny-1m", "select it"]),
    "start from itself": (tuned({"model": "tuned"}), ["models.tuned", "tuned-tiny-1m starts from tuned-tiny-1m", "circle"]),
    "start in a circle": (
        both(tuned({"model": "other"}), tuned({"model": "tuned"}, "other")),
        ["models.tuned", "tuned-tiny-1m starts from other-tiny-1m starts from tuned-tiny-1m", "circle"],
    ),
    "start from other sizes": (tuned({"model": "gla"}, layer={"layer": "gla", "convolution": 2}), ["models.tuned", "q_conv", "drop"]),
    "drop nothing": (tuned({"model": "gla", "drop": ["*.betta"]}), ["models.tuned.init_from", "'*.betta'", "means no parameter"]),
    "unknown override": (tuned({"model": "gla"}, training={"warmup": 1}), ["models.tuned.training.warmup", "'warmup_steps'"]),
    "override out of bounds": (tuned({"model": "gla"}, training={"floor": 2}), ["models.tuned.training.floor", "2"]),
    "own warm-up too long": (tuned({"model": "gla"}, training={"warmup_steps": 999}), ["models.tuned.training.warmup_steps", "999", "244"]),
    "replace too many": (tuned({"model": "gla", "replace": {**REPLACE, "count": 3}}), ["models.tuned", "count", "3", "2"]),
    "replace by nothing known": (tuned({"model": "gla", "replace": {**REPLACE, "by": "depth"}}), ["init_from.replace.by", "memory_window"]),
    "replace an unknown layer": (
        tuned({"model": "gla", "replace": {**REPLACE, "layer": {"layer": "messa"}}}),
        ["models.tuned", "'messa'", "'mesa'"],
    ),
    "replace in a pattern": (
        tuned({"model": "gla", "replace": REPLACE}, layer={"pattern": [{"layer": "gla"}]}),
        ["models.tuned", "replace", "pattern"],
    ),
    "replace without windows": (
        tuned({"model": "transformer", "replace": REPLACE}, layer={"layer": "attention"}),
        ["models.tuned", "'attention'", "forget gate"],
    ),
    "replace another kind": (tuned({"model": "gla", "replace": REPLACE}, layer={"layer": "mamba2"}), ["models.tuned", "'gla'", "layer"]),
    "start from replaced layers": (
        both(tuned({"model": "gla", "replace": REPLACE}), tuned({"model": "tuned"}, "other")),
        ["models.other.init_from", "'tuned'"],
    ),
}


@pytest.fixture(scope="module")
def nano() -> dict[str, Any]:
    return read(NANO)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_clear_sentence(name: str, nano: dict[str, Any]) -> None:
    change, words = MISTAKES[name]
    params = copy.deepcopy(nano)
    change(params)
    with pytest.raises(ValueError) as caught:
        parse(params)
    message = str(caught.value)
    assert message.startswith("params.yaml: ")
    assert "\n" not in message and "pydantic" not in message and len(message) < 400
    for word in words:
        assert word in message, message


TEXTS = {
    "not YAML": ("grid: [a\nmodels: {}", ["line", "YAML"]),
    "a tab": ("grid:\n\tmodels: []", ["line 2", "YAML"]),
    "a duplicate key": ("study: a\nstudy: b", ["line 2", "study"]),
    "a list": ("- 1", ["a list"]),
    "empty": ("", ["null"]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_that_is_no_table(name: str, tmp_path: Path) -> None:
    text, words = TEXTS[name]
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(ValueError) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_folder_without_params(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no study"):
        load(tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_bytes(b"study: \xff\xfe")
    with pytest.raises(ValueError, match="UTF-8"):
        load(tmp_path)


def test_the_studies_are_well_formed() -> None:
    mesanet, nano = load(ROOT), load(NANO)
    assert len(cells(mesanet)) == 9 * 3 * 2 + 5 * 2 * 2 + 6
    assert mesanet.steps("15b") == 28_610 and mesanet.steps("50b") == 95_367
    assert {"transformer", "swa", "gla", "mesa", "mesa-cg-2"} <= {cell.model for cell in cells(nano)}


def test_every_study_has_the_same_dvc_yaml() -> None:
    ours = (ROOT / "dvc.yaml").read_bytes()
    for path in (ROOT / "pipelines").glob("*/params.yaml"):
        copy_ = path.with_name("dvc.yaml")
        assert copy_.read_bytes() == ours and not copy_.is_symlink()
