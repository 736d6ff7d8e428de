"""Windows and documents on a GPU by torch's FlexAttention: blocks of keys that no query sees are never visited, and no mask is ever made.

Shapes: B batch, T time, H heads, K key size, V value size, Q blocks of queries, J blocks of keys.
"""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kernels.attention.cache import Rule, visible

BLOCK = 128

_compiled = torch.compile(flex_attention, dynamic=False)


def attend(
    q_BTHK: torch.Tensor, k_BTHK: torch.Tensor, v_BTHV: torch.Tensor, rule: Rule, *, window: int | None, scale: float
) -> torch.Tensor:
    """o [B, T, H, V] for queries over their own keys, as the rule has it; no cache before them."""
    T = q_BTHK.shape[1]

    def seen(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        ahead = query >= key
        if rule.whole:
            return ahead & (query - key < window)
        return visible(rule, window, (b, query), (b, key))

    blocks = causal_blocks(T, window if rule.whole else None, seen, q_BTHK.device)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHV))
    run = flex_attention if torch.compiler.is_compiling() else _compiled
    return run(q, k, v, block_mask=blocks, scale=scale).transpose(1, 2)


def causal_blocks(T: int, window: int | None, seen, device: torch.device) -> BlockMask:
    """Which blocks of keys each block of queries visits: those up to its own, within the window; whole ones need no mask."""
    index = torch.arange(-(-T // BLOCK), device=device)
    behind_QJ = index[:, None] - index[None]
    visited = behind_QJ >= 0
    whole = behind_QJ != behind_QJ
    if window is not None:
        visited = visited & (behind_QJ * BLOCK - BLOCK + 1 < window)
        whole = (behind_QJ > 0) & (behind_QJ * BLOCK + BLOCK - 1 < window)
    return BlockMask.from_kv_blocks(*_listed(visited & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(T, T))


def _listed(blocks_QJ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks each row has, and which: [1, 1, Q] and [1, 1, Q, J], those it has first."""
    order = torch.argsort(blocks_QJ.int(), dim=-1, descending=True, stable=True)
    return blocks_QJ.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]
