"""Continue prompts: the prompt at once, then a token at a time by each layer's constant-memory step.

Shapes: B batch, P prompt tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from models.backbone import Model
from models.layers.layer import Array


def sample(logits_BV: np.ndarray, temperature: float, random: np.random.Generator) -> np.ndarray:
    """A token of each row: the likeliest at temperature 0, else drawn from softmax(logits / temperature)."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    return (logits_BV / temperature + random.gumbel(size=logits_BV.shape)).argmax(-1)


def stream(
    model: Model, params: Mapping[str, Array], prompt_BP: np.ndarray, *, temperature: float = 0.0, seed: int = 0, segments_BP: np.ndarray | None = None
) -> Iterator[np.ndarray]:  # fmt: skip
    """Tokens [B] that follow the prompts, one after another, without end.

    prompt_BP: integers, at least one a row. segments_BP: int32, -1 where a row is padded (prompts of different lengths, padded in front).
    Raises ValueError for an empty prompt or a temperature below 0.
    """
    if prompt_BP.ndim != 2 or not prompt_BP.size:
        raise ValueError(f"The prompts have shape {prompt_BP.shape}; give [batch, tokens] with at least one token each.")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; 0 takes the likeliest token, above 0 draws.")
    random = np.random.default_rng(seed)
    decoder = model.framework.Decoder(model, params)
    logits_BV = decoder.prefill(prompt_BP, segments_BP)
    while True:
        token_B = sample(logits_BV, temperature, random)
        yield token_B
        logits_BV = decoder.step(token_B)


def generate(
    model: Model, params: Mapping[str, Array], prompt_BP: np.ndarray, length: int, *, temperature: float = 0.0, seed: int = 0, stop: int | None = None,
    segments_BP: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """`length` tokens [B, length] after the prompts, or fewer once every row has had the token `stop`. Arguments as `stream`'s."""
    tokens, ended = [], np.zeros(len(prompt_BP), bool)
    for token_B in stream(model, params, prompt_BP, temperature=temperature, seed=seed, segments_BP=segments_BP):
        tokens.append(token_B)
        ended |= token_B == stop
        if len(tokens) == length or ended.all():
            return np.stack(tokens, 1)
    raise AssertionError("a stream has no end")
