"""Every Pallas kernel, forward and backward, compiled for real TPUs by libtpu's compiler, at the shapes of the MesaNet study."""

import pytest

import kernels
from models.backends import jax_ahead
from models.backends.jax_ahead import INPUTS, Kernel

NAMES = [name for name in INPUTS if "pallas" in kernels.backends(name)]
TOPOLOGIES = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"]
SHAPES = [("bfloat16", 2, 12), ("float32", 1, 8), ("bfloat16", 1, 6)]  # rows a device, heads: those of the three scales
COMPOSED = ("attention", "mlstm")  # of JAX's kernels, and of linear attention's
OPTIONS = {"mesa": {"steps": 30, "eps": 1e-4}}
ahead = pytest.mark.skipif(jax_ahead.missing() is not None, reason=str(jax_ahead.missing()))


def study(name: str, dtype: str, B: int, H: int) -> Kernel:
    sizes = {"B": B, "T": 2048, "H": H, "K": 128, "V": 128, "D": 128 * H}
    return Kernel(name, sizes, dtype, backward=True, options=OPTIONS.get(name, {}))


@ahead
@pytest.mark.parametrize("shapes", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("topology", [TOPOLOGIES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in TOPOLOGIES[1:])])
def test_every_kernel_compiles_for_real_tpus(topology, shapes):
    """Within its memory: a launch states how much of a core's fast memory it may use, and the compiler refuses more."""
    requests = [study(name, *shape) for name in NAMES for shape in SHAPES[: 1 if name in COMPOSED and shapes == 2 else shapes]]
    for request, found in zip(requests, jax_ahead.ask(topology, requests), strict=True):
        assert found.error is None, (request, found.error)
        assert found.kernels >= 2 and found.chosen == {request.operation: "pallas"}, (request, found)
        assert found.flops > 0 and found.bytes > 0, "the cost estimates are in the program"


@pytest.mark.slow
@ahead
def test_other_head_sizes_compile():
    """Palimpsa's heads, and the largest: what is not a multiple of 128 is the compiler's to pad."""
    sizes = [(48, 48), (96, 192), (256, 256)]
    requests = [Kernel(name, {"B": 1, "T": 333, "H": 2, "K": K, "V": V, "D": 2 * K}, backward=True) for name in NAMES for K, V in sizes]
    for request, found in zip(requests, jax_ahead.ask("v5e:2x2", requests), strict=True):
        assert found.error is None, (request, found.error)


@ahead
def test_what_a_tpu_refuses_is_an_error():
    """Its HBM, and the fast memory that a kernel may use: 64 states of 256 x 256, twice, are 32 MiB where 16 are granted."""
    too_large = Kernel("linear_attention", {"B": 4096, "T": 2048, "H": 64, "K": 128, "V": 128})
    too_long = Kernel("palimpsa", {"B": 1, "T": 128, "H": 1, "K": 256, "V": 256}, backward=True, tuning={"chunk": 64})
    large, long = jax_ahead.ask("v6e:2x2", [too_large, too_long])
    assert "exceeds available HBM" in large.error and "memory space vmem" in long.error
    with pytest.raises(ValueError, match="there is no TPU topology 'v9x:2x2'"):
        list(jax_ahead.ask("v9x:2x2", [too_large]))
