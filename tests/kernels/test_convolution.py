"""The short convolution and its documents; the contracts of every operation are in test_contracts.py."""

import numpy as np
import pytest
import torch

from kernels.convolution import short_convolution

SEGMENTS = np.array([[-1, 3, 3, 3, -1, 3, 7], [0, 1, 1, -1, 1, -1, -1]], np.int32)


def test_the_convolution_skips_padding_and_stays_in_its_segment():
    """Against each document convolved alone, split anywhere into two calls."""
    random = torch.Generator(torch.get_default_device()).manual_seed(0)
    x, w = torch.randn(2, 7, 6, generator=random), torch.randn(4, 6, generator=random)
    segments = torch.tensor(SEGMENTS)
    y, state = short_convolution(x, w, segments=segments)
    for b in range(2):
        assert (y[b, segments[b] < 0] == 0).all()
        for document in set(SEGMENTS[b]) - {-1}:
            here = segments[b] == document
            alone, _ = short_convolution(x[b : b + 1, here], w)
            torch.testing.assert_close(y[b, here], alone[0])
    for cut in range(1, 7):
        first, middle = short_convolution(x[:, :cut], w, segments=segments[:, :cut])
        second, end = short_convolution(x[:, cut:], w, state=middle, segments=segments[:, cut:])
        torch.testing.assert_close(torch.cat((first, second), 1), y)
        torch.testing.assert_close(end, state)


def test_heads_have_unit_length():
    x, w = torch.randn(2, 7, 6), torch.randn(4, 6)
    y, _ = short_convolution(x, w, heads=2)
    assert (y.reshape(2, 7, 2, 3).norm(dim=-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("W", [1, 2, 3])
def test_shorter_windows(W):
    """Against four weights with zeros in front."""
    x, w = torch.randn(2, 7, 6), torch.randn(W, 6, requires_grad=True)
    long = torch.cat((torch.zeros(4 - W, 6), w))
    (a, state), (b, _) = short_convolution(x, w, silu=True), short_convolution(x, long, silu=True)
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), w)[0] for y in (a, b)))
    assert state.inputs_BWD.shape == (2, W - 1, 6)


def test_mistakes_are_named():
    x, w = torch.randn(2, 7, 6), torch.randn(4, 6)
    with pytest.raises(ValueError, match="4 heads do not divide 6 channels"):
        short_convolution(x, w, heads=4)
    _, state = short_convolution(x, w)
    with pytest.raises(ValueError, match=r"it must be \[2, 2, 6\]"):
        short_convolution(x, w[1:], state=state)
