"""lm-eval (EleutherAI) scores our checkpoints: `pip install 'strata[lm-eval]'`, then, in a study's folder,

    python -m stages.harness run --model strata --tasks piqa --model_args spec=specs/evaluate/CELL.json,weights=weights/CELL,vocabulary=vocabulary

takes all that `lm-eval` does. Texts are tokenized as lm-eval does (what goes on is cut off the tokens of the whole), BOS stands before everything, as in
training, and what exceeds the window, the training's length unless `window` says otherwise, loses its start.

Where its rules are not ours: lm-eval normalises a choice by its characters, we by tokens (MesaNet's rule) or bytes; lm-eval has no recall task's cut that keeps the question.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages import engine, initial
from stages.evaluation.parameters import Parameters
from stages.evaluation.scorer import Scorer
from stages.spec import Context, Spec
from stages.tasks.engine import Engine, stops
from stages.tasks.prompts import Ask

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

NEW_TOKENS = 256  # gone on with where a task does not say
NAME = "strata"


class Checkpoint:
    """A cell's weights, to be asked in tokens. spec: its evaluation's. window: input tokens at most; None: the training's length."""

    def __init__(
        self, spec: Path, weights: Path, vocabulary: Path, *, window: int | None = None, device: str = "auto", threads: int | None = None,
        batch_tokens: int | None = None,
    ) -> None:  # fmt: skip
        import models
        from models.reader import reader

        given = Spec.load(spec)
        if given.stage != "evaluate":
            raise ValueError(f"{spec} is a spec of {given.stage}; give the evaluation's, specs/evaluate/<cell>.json.")
        parameters = Parameters.model_validate(given.parameters)
        context = Context(threads=threads, device=device, settings={"batch_tokens": batch_tokens} if batch_tokens else {})
        entry = initial.trained_entry(weights, parameters.model)
        model = models.build(entry, parameters.scale, vocab_size=parameters.vocab_size, backend=engine.backend(context))
        scorer = Scorer(model, parameters, weights, context)
        self.tokenizer = scorer.tokenizer(vocabulary)
        self.window = window or parameters.sequence_length
        self.engine = Engine(reader(scorer.trainer), self.tokenizer, self.window, scorer.batch_tokens)
        self.bos = np.array([parameters.bos], np.int32)

    def encode(self, text: str) -> list[int]:
        return self.engine.encode([text])[0].tolist() if text else []

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, bos: bool = True) -> list[tuple[float, bool]]:
        """(log likelihood in nats, whether each token is the likeliest) of each continuation behind its context. bos: BOS before the context."""
        last = self.bos if bos else self.bos[:0]
        asks = [
            Ask([self._fitted(context, len(option) - (not bos))], [np.array(option[-self.window :], np.int32)], [0])
            for context, option in pairs
        ]
        found: list[tuple[float, bool]] = [(0.0, True)] * len(asks)
        if asks:
            for place, answer in self.engine.answers(self.engine.reader.begin(last[:0]), last, asks, 0):
                found[place] = (-answer.nll[0], answer.matched)
        return found

    def score_whole(self, text: str) -> float:
        """Log likelihood of a text, in windows that do not overlap, each knowing its own tokens alone (see stages/evaluation/sequences.py)."""
        tokens = [int(self.bos[0]), *self.encode(text)]
        windows = [tokens[start : start + self.window + 1] for start in range(0, len(tokens) - 1, self.window)]
        return sum(score for score, _ in self.score([(window[:1], window[1:]) for window in windows], bos=False))

    def go_on(self, contexts: Sequence[str], *, until: Sequence[str], new_tokens: int) -> list[str]:
        """What greedily follows each context, up to the first of `until`, BOS, or `new_tokens` tokens."""
        if not contexts:
            return []
        ending = stops(self.tokenizer) if "\n" in until else np.arange(self.tokenizer.size) == self.bos[0]
        self.engine.ending = ending
        asks = [Ask([self._fitted(self.encode(context), new_tokens)], [], []) for context in contexts]
        found = [""] * len(asks)
        for place, answer in self.engine.answers(self.engine.reader.begin(self.bos[:0]), self.bos, asks, new_tokens):
            kept = [token for token in answer.likeliest.tolist() if token != self.bos[0]]
            found[place] = _before(self.tokenizer.decode(kept), until)
        return found

    def _fitted(self, context: Sequence[int], behind: int) -> np.ndarray:
        """The end of a context that leaves room for `behind` tokens and BOS; the last token is not read."""
        kept = max(0, self.window - behind)
        return np.array(context[max(0, len(context) - kept) :], np.int32)


def _before(text: str, until: Sequence[str]) -> str:
    return text[: min((text.index(end) for end in until if end and end in text), default=len(text))]


def language_model() -> type:
    """lm-eval's model class over a Checkpoint, registered under NAME. ValueError where lm-eval is not installed."""
    try:
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import register_model
    except ImportError as error:
        raise ValueError(f"lm-eval is not installed ({error}): pip install 'strata[lm-eval]'.") from error

    class Strata(TemplateLM):
        """A cell. model_args: spec, weights, vocabulary (paths), and Checkpoint's options."""

        def __init__(
            self, spec: str, weights: str, vocabulary: str, *, window: int | None = None, threads: int | None = None, device: str | None = None,
            batch_tokens: int | None = None, batch_size: Any = None, max_batch_size: Any = None,
        ) -> None:  # fmt: skip
            super().__init__()
            options = {"window": window, "device": device or "auto", "threads": threads, "batch_tokens": batch_tokens}
            self.checkpoint = Checkpoint(Path(spec), Path(weights), Path(vocabulary), **options)

        @property
        def eot_token_id(self) -> int:
            return int(self.checkpoint.bos[0])

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return self.checkpoint.encode(string)

        def _loglikelihood_tokens(self, requests: list[tuple[Any, list[int], list[int]]], **_: Any) -> list[tuple[float, bool]]:
            """An empty context comes as BOS alone, which stands before every context anyway."""
            alone = [self.eot_token_id]
            return self.checkpoint.score([([] if context == alone else context, option) for _, context, option in requests])

        def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
            return [self.checkpoint.score_whole(request.args[0]) for request in requests]

        def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
            """Those that end alike are gone on with together. ValueError where a task wants samples and not the likeliest."""
            found, alike = [""] * len(requests), {}
            for place, request in enumerate(requests):
                context, options = request.args
                if options.get("do_sample") and options.get("temperature", 1.0) > 0:
                    raise ValueError("This task draws samples; Strata goes on greedily: give --gen_kwargs do_sample=False.")
                until = options.get("until") or []
                key = ((until,) if isinstance(until, str) else tuple(until), int(options.get("max_gen_toks", NEW_TOKENS)))
                alike.setdefault(key, []).append((place, context))
            for (until, new_tokens), those in alike.items():
                texts = self.checkpoint.go_on([context for _, context in those], until=until, new_tokens=new_tokens)
                for (place, _), text in zip(those, texts, strict=True):
                    found[place] = text
            return found

    return register_model(NAME)(Strata)


if __name__ == "__main__":
    language_model()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
