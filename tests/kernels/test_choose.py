"""Which backend runs: the choice, the override, the refusals, the record."""

import warnings

import pytest
import torch

import kernels
from kernels.linear_attention import linear_attention

SHAPE = {"B": 1, "T": 4, "H": 2, "K": 8, "V": 8}


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    monkeypatch.delenv("STRATA_KERNELS", raising=False)
    monkeypatch.setattr(kernels, "_chosen", {})
    monkeypatch.setattr(kernels, "_warned", set())


def run(**options):
    x = torch.ones(1, 4, 2, 8)
    return linear_attention(x, x, x, torch.zeros(1, 4, 2), **options)


def test_the_choice_is_recorded():
    assert kernels.chosen() == {}
    run()
    assert kernels.chosen() == {"linear_attention": "chunked"}
    run(backend="reference")
    assert kernels.chosen() == {"linear_attention": "reference"}


def test_every_operation_chooses_on_the_cpu_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for operation in kernels.OPERATIONS:
            assert kernels.choose(operation, SHAPE, "float32", "cpu") == (
                "library" if operation in ("attention", "lru_input", "rope") else "chunked"
            )


def test_the_environment_overrides(monkeypatch):
    monkeypatch.setenv("STRATA_KERNELS", "reference")
    run()
    assert kernels.chosen() == {"linear_attention": "reference"}
    monkeypatch.setenv("STRATA_KERNELS", "chunked")
    assert kernels.choose("attention", SHAPE, "float32", "cpu") == "library", "attention has no chunked form: it chooses as ever"


@pytest.mark.parametrize("name", ["triton", "pallas"])
def test_what_does_not_exist_is_refused_by_name(monkeypatch, name):
    with pytest.raises(ValueError, match=f"rls_mesa cannot run as {name}: rls_mesa has no such implementation"):
        kernels.choose("rls_mesa", SHAPE, "float32", "cpu", name)
    monkeypatch.setenv("STRATA_KERNELS", name)
    with pytest.raises(ValueError, match=f"cannot run as {name}"):
        run()
    monkeypatch.setenv("STRATA_KERNELS", "fast")
    with pytest.raises(ValueError, match="no kernel backend 'fast'; ask for one of reference"):
        run()
    with pytest.raises(ValueError, match="no operation 'pooling'"):
        kernels.choose("pooling", SHAPE, "float32", "cpu")


def test_a_refusal_on_an_accelerator_is_one_warning_that_names_the_operation(monkeypatch):
    offered = {
        **kernels.backends("mesa"),
        "triton": lambda shape, dtype, device: f"K is {shape['K']}, at most 128" if shape["K"] > 128 else None,
    }
    monkeypatch.setitem(kernels._offered, "mesa", offered)
    assert kernels.choose("mesa", SHAPE, "bfloat16", "cuda") == "triton"
    with pytest.warns(UserWarning, match="mesa runs as chunked on cuda.*K is 256, at most 128"):
        assert kernels.choose("mesa", SHAPE | {"K": 256}, "bfloat16", "cuda") == "chunked"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.choose("mesa", SHAPE | {"K": 256}, "bfloat16", "cuda")
    with pytest.raises(ValueError, match="K is 256"):
        kernels.choose("mesa", SHAPE | {"K": 256}, "bfloat16", "cuda", "triton")


def test_an_option_that_a_fused_kernel_lacks_is_declined_aloud(monkeypatch):
    monkeypatch.setattr(kernels, "_warned", set())
    monkeypatch.setattr(kernels, "_chosen", {})
    with pytest.warns(UserWarning, match="mesa runs as chunked, which is slow; not as pallas: it keeps every step"):
        assert kernels.decline("mesa", "pallas", "chunked", "it keeps every step") == "chunked"
    assert kernels.chosen() == {"mesa": "chunked"}
    assert kernels.decline("mesa", "reference", "chunked", "it keeps every step") == "reference"


def test_an_unrolled_gradient_is_declined_by_the_fused_kernel(monkeypatch):
    monkeypatch.setattr(kernels, "_warned", set())
    monkeypatch.setitem(kernels._offered, "mesa", {"triton": lambda *_: None, "chunked": lambda *_: None})
    from kernels.mesa import mesa

    q, gate = torch.randn(1, 5, 1, 16), torch.zeros(1, 5, 1)
    with pytest.warns(UserWarning, match='gradient "unrolled" keeps every step'):
        mesa(q, q, q, gate, gate, torch.ones(1, 16), gradient="unrolled", backend="triton")
