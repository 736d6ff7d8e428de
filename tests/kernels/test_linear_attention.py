"""Linear attention's Triton pieces by themselves: the walks that Mesa shares, values beyond one program, the one-token kernel.

On a card, or in Triton's interpreter (TRITON_INTERPRET=1), which takes float32 alone.
"""

import os

import pytest
import torch

from kernels import chunks, launch
from kernels.linear_attention import chunked, reference
from tests.kernels.harness import error, make, run_torch, to_torch
from tests.kernels.operations import LINEAR, OPERATIONS

if os.environ.get("STRATA_KERNELS") != "triton":
    pytest.skip("STRATA_KERNELS=triton runs the Triton kernels", allow_module_level=True)

SPLIT = 1e-5  # products of bfloat16 high and low parts, summed in float32
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
DTYPES = [(F32, F32, F32, 2e-6)]
if not launch.INTERPRETED:
    DTYPES += [(BF16, BF16, F32, SPLIT), (F32, BF16, F32, SPLIT), (BF16, BF16, BF16, 1e-2), (F32, BF16, BF16, 1e-2)]


def operands(a: torch.dtype, b: torch.dtype, B: int = 2, T: int = 70, H: int = 2, K: int = 48, V: int = 80) -> list[torch.Tensor]:
    """a [B, T, H, K], b [B, T, H, V], log_decay with drops, beta, sign, S"""
    random = torch.Generator(torch.get_default_device()).manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    log_decay = -0.1 * normal(B, T, H).abs()
    log_decay[:, ::17] = -float("inf")
    sign = torch.where(normal(B, T, H) < -0.5, -1.0, 1.0)
    return [normal(B, T, H, K).to(a), normal(B, T, H, V).to(b), log_decay, normal(B, T, H).sigmoid(), sign, normal(B, H, K, V)]


@pytest.mark.parametrize(("a", "b", "dtype", "bound"), DTYPES)
@pytest.mark.parametrize("plain", [False, True])
def test_walks_over_the_chunks(a, b, dtype, bound, plain):
    from kernels.linear_attention.triton import chunk_end_gradients, chunk_starts

    k, v, log_decay, beta, sign, S = operands(a, b)
    beta, sign = (None, None) if plain else (beta, sign)
    (B, _, H, K), V, C = k.shape, v.shape[-1], 32
    k64, v64, decay64, S64, sign64 = (None if x is None else x.to(F64) for x in (k, v, log_decay, S, sign))
    written = v64 if beta is None else v64 * beta.to(F64)[..., None]
    by_chunk = lambda x: x.reshape(-1, B, H, K, V).transpose(0, 1)  # noqa: E731

    starts, last = chunk_starts(k, v, log_decay, beta, sign, S, chunk=C, dtype=dtype)
    cut, last64 = chunked.cut(k64, written, decay64, sign64, S64, C)
    assert starts.dtype == dtype and error(starts, by_chunk(cut.starts_MKV)) <= bound and error(last, last64) <= bound
    ends, dS = chunk_end_gradients(k, v, log_decay, sign, S, chunk=C, dtype=dtype)
    ends64, dS64 = chunked.state_gradients(chunks.split(k64, C), cut, chunks.split(v64, C), S64)
    assert ends.dtype == dtype and error(ends, by_chunk(ends64)) <= bound and error(dS, dS64) <= bound


@pytest.mark.parametrize("name", ["linear_attention", "mlstm"])
def test_more_values_than_a_program_holds(name):
    """In float32 beyond 128 values go in parts."""
    operation = OPERATIONS[name]
    xs, state = make(operation, (1, 20, 1, 24, 144))
    ours, exact = (run_torch(operation, xs, state, None, *how) for how in (("float32", "triton"), ("float64", "reference")))
    assert all(error(ours[n], exact[n]) <= 1e-5 for n in exact)


@pytest.mark.parametrize("segmented", [False, True])
def test_one_token_is_the_references(segmented):
    from kernels.linear_attention import one_token

    xs, state = make(OPERATIONS["linear_attention signed"], (5, 1, 2, 24, 40))
    given, start = to_torch(LINEAR, xs, state, "float32", ids=[0, 0, 3, -1, 2])
    *given, sign = (x[:, 0] for x in given.values())
    assert list(xs)[-1] == "sign"
    segment_B = torch.tensor([0, 1, -1, 4, 2], dtype=torch.int32) if segmented else None
    (o, ours), (o_exact, exact) = (
        f(*given, sign=sign, scale=0.5, state=start, segment_B=segment_B) for f in (one_token.step, reference.step)
    )
    assert error(o, o_exact) <= 1e-6 and error(ours.S_BHKV, exact.S_BHKV) <= 1e-6 and torch.equal(ours.segment_B, exact.segment_B)
