"""Attention by blocks, as a GPU has it: which blocks are visited, and what is seen inside them, against the mask written out."""

import pytest
import torch

from kernels.attention import cache, flexible, reference
from tests.kernels.harness import error, split_documents


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("window", [None, 1, 2, 127, 128, 129, 130, 256, 300, 5000])
@pytest.mark.parametrize("T", [1, 100, 128, 650])
def test_visited_blocks_hold_all_that_is_seen_and_whole_ones_nothing_else(T, window):
    blocks = flexible.causal_blocks(T, window, lambda b, h, q, k: q >= k, torch.device("cpu"))
    size = flexible.BLOCK * -(-T // flexible.BLOCK)
    behind = torch.arange(size)[:, None] - torch.arange(size)[None]
    seen = (behind >= 0) & (behind < (window or size))
    some, all_ = (
        f(seen.reshape(-(-size // 128), 128, -(-size // 128), 128).transpose(1, 2).flatten(2), -1) for f in (torch.any, torch.all)
    )

    def listed(counts, indices):
        there = torch.zeros(indices.shape[-2:], dtype=torch.bool)
        for row in range(len(there)):
            there[row, indices[0, 0, row, : int(counts[0, 0, row])].long()] = True
        return there

    partial = listed(blocks.kv_num_blocks, blocks.kv_indices)
    whole = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert torch.equal(partial | whole, some) and not (partial & whole).any()
    assert not (whole & ~all_).any() and (window is None or torch.equal(whole, all_))


@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("window", [None, 3, 40])
def test_what_is_seen_is_the_references(window, documents, monkeypatch):
    """FlexAttention's own unfused form, which follows the rule and not the blocks."""
    if window is None and not documents:
        pytest.skip("plain causal attention has no rule")
    monkeypatch.setattr(flexible, "_compiled", flexible.flex_attention)
    q, k, v = (normal(2, 67, 2, 16, seed=seed) for seed in range(3))
    segments = torch.tensor(split_documents(2, 67)) if documents else None
    seen, _ = cache.place(k, v, window, None, segments)
    assert seen.k_BAHK.shape == k.shape and seen.rule.whole is not documents
    found = flexible.attend(q, seen.k_BAHK, seen.v_BAHV, seen.rule, window=window, scale=0.3)
    expected = reference.attend(q, seen, window=window, scale=0.3)
    if documents:
        found, expected = (torch.where((segments >= 0)[..., None, None], x, 0.0) for x in (found, expected))
    assert error(found, expected) <= 4e-6
