"""What is attention's own: the window, and the cache's room."""

import jax
import jax.numpy as jnp
import pytest
import torch

from kernels.attention import attention, cache, positions, step
from tests.kernels.harness import error


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def qkv(T=19):
    return normal(2, T, 2, 8), normal(2, T, 2, 8, seed=1), normal(2, T, 2, 8, seed=2)


@pytest.mark.parametrize("window", [1, 4, 19, 50])
def test_a_window_holds_so_many_tokens_itself_included(window):
    q, k, v = qkv()
    o, state = attention(q, k, v, window=window)
    for t in range(19):
        first = max(t - window + 1, 0)
        alone, _ = attention(q[:, first : t + 1], k[:, first : t + 1], v[:, first : t + 1])
        assert error(o[:, t], alone[:, -1]) <= 4e-6
    assert state.k_BSHK.shape[1] == window and int((state.position_BS[0] >= 0).sum()) == min(window, 19)
    if window == 1:
        torch.testing.assert_close(o, v)


def test_full_attention_grows_its_cache_or_says_so():
    """Eager steps make room; a traced step without room gives NaN and not something else."""
    q, k, v = qkv()
    whole, _ = attention(q, k, v)
    state, outputs = None, []
    for t in range(19):
        o, state = step(q[:, t], k[:, t], v[:, t], state=state)
        outputs.append(o)
    assert error(torch.stack(outputs, 1), whole) <= 4e-6 and 19 <= state.k_BSHK.shape[1] <= 40

    q, k, v = (jnp.asarray(x.numpy()) for x in (q, k, v))
    traced = jax.jit(lambda q, k, v, state: step(q, k, v, state=state))
    _, full = attention(q[:, :18], k[:, :18], v[:, :18])
    assert jnp.isnan(traced(q[:, 18], k[:, 18], v[:, 18], full)[0]).all()
    o, _ = traced(q[:, 18], k[:, 18], v[:, 18], cache.reserve(full, 30))
    assert error(o, whole[:, 18]) <= 4e-6


def test_positions_count_on_and_skip_padding():
    segments = torch.tensor([[-1, 4, 4, -1, 5]], dtype=torch.int32)
    assert positions(segments, None, segments).tolist() == [[-1, 0, 1, 1, 2]]
    q, k, v = (x[:1, :5] for x in qkv())
    _, state = attention(q, k, v, segments=segments)
    assert positions(segments, state).tolist() == [[3, 4, 5, 6, 7]]


def test_a_window_must_hold_the_token_itself():
    with pytest.raises(ValueError, match="window is 0"):
        attention(*qkv(), window=0)
