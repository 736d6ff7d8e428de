"""The tokenizer of a vocabulary folder: gigatoken where it is installed and right, else tiktoken (gpt2) or tokenizers (bpe).

Those two are the reference: what gigatoken gives is compared with them on a sample of everything that is tokenized.
A text is only ever encoded as ordinary text. A long text is given to the encoder in parts, cut where the split pattern of GPT-2
(which a trained vocabulary uses too) always cuts: between a character that is no white space and the white space after it. So
its tokens are those of the whole text. A text that has no such place in HUGE bytes is cut at the last whole character there.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from binascii import a2b_base64
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.documents import HUGE, SPECIAL, offsets_of, text_bytes
from stages.schemas import token_type

if TYPE_CHECKING:
    import pyarrow as pa
    import tokenizers

RECORD, BPE = "tokenizer.json", "bpe.json"
GPT2_SIZE, GPT2_BOS = 50257, 50256
GPT2_SHA256 = "sha256:306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
# The split pattern of OpenAI's gpt-2, encoder.py.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

SAMPLE = 1 << 14  # bytes of text compared with the reference, of a batch
SAFE = re.compile(r"\S(?=[ \n])")

Encode = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]  # (offsets, bytes) -> (offsets, tokens)


def byte_level() -> tokenizers.Tokenizer:
    """An empty byte-level BPE with GPT-2's splitting."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def gpt2_file() -> Path:
    """The shipped rank file of GPT-2; ValueError where it is not OpenAI's."""
    path = Path(str(resources.files("stages") / "data" / "gpt2.tiktoken"))
    try:
        found = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}); install the package again.") from error
    if found != GPT2_SHA256:
        raise ValueError(f"{path} is not OpenAI's vocabulary (found {found[:19]}, wanted {GPT2_SHA256[:19]}); install the package again.")
    return path


class Tokenizer:
    """A vocabulary, its encoder, and its decoder.

    kind, size, bos: the vocabulary's. encoder: "gigatoken", "tiktoken" or "tokenizers". fallback: why it is not gigatoken, or None.
    """

    def __init__(self, folder: Path, *, parallel: bool = True) -> None:
        try:
            record = json.loads((folder / RECORD).read_text())
            self.kind, self.size, self.bos, digest = (record[name] for name in ("kind", "size", "bos", "digest"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{folder / RECORD} is not a readable vocabulary ({error}). Delete the folder and make the vocabulary again."
            ) from error
        if self.kind == "gpt2":
            self.file, self.reference = gpt2_file(), "tiktoken"
            self._plain: Any = _tiktoken(self.file)
        else:
            self.file, self.reference = folder / BPE, "tokenizers"
            self._plain = _tokenizers(self.file, digest)
        self.fallback: str | None = None
        self.encoder = "gigatoken"
        try:
            self._encode = _gigatoken(self.kind, self.file, parallel)
        except (ImportError, ValueError, RuntimeError) as error:
            self.fall_back(f"gigatoken cannot be used here ({type(error).__name__}: {error})")

    def fall_back(self, reason: str) -> None:
        """Use the reference from now on, and say so."""
        warnings.warn(f"{reason}; {self.reference}, which is slower, is used instead.", stacklevel=2)
        self.encoder, self.fallback, self._encode = self.reference, reason, self._reference

    def encode(self, text: pa.LargeBinaryArray) -> pa.ListArray:
        """Tokens of each document (UTF-8, not null): list<uint16 or uint32>."""
        import pyarrow as pa

        ends, data = offsets_of(text) if len(text) else np.zeros(1, np.int64), text_bytes(text)
        ends = ends - ends[0]
        parts = ends
        if len(text) and np.diff(ends).max() > HUGE:
            parts = np.array(
                [0, *(end for start, stop in zip(ends[:-1], ends[1:], strict=True) for end in cuts(data, int(start), int(stop)))], np.int64
            )
        offsets, tokens = self._encode(parts, data)
        if parts is not ends:
            offsets = offsets[np.searchsorted(parts, ends)]
        kind = token_type(self.size)
        return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(tokens.astype(kind.to_pandas_dtype(), copy=False)))

    def difference(self, text: pa.LargeBinaryArray, tokens: pa.ListArray, seed: int) -> str | None:
        """Compare a sample of a batch with the reference, token for token: the beginning of one document. None, or what differs."""
        if self.encoder == self.reference or not len(text):
            return None
        ends, data = offsets_of(text), text_bytes(text)
        ends = ends - ends[0]
        one = seed * 7919 % len(text)
        start, stop = int(ends[one]), int(ends[one + 1])
        end = stop if stop - start <= SAMPLE else safe_cut(data, start, _character(data, start + SAMPLE))
        if end is None:
            return None
        wanted = self._plain_tokens(data[start:end].tobytes())
        found = tokens[one].values.to_numpy()
        same = np.array_equal(found if end == stop else found[: len(wanted)], wanted)
        return None if same else f"gigatoken differs from {self.reference} in document {one} of a batch"

    def _plain_tokens(self, text: bytes) -> np.ndarray:
        if self.kind == "gpt2":
            return np.array(self._plain.encode_ordinary(text.decode()), np.uint32)
        return np.array(self._plain.encode(text.decode()).ids, np.uint32)

    def _reference(self, offsets: np.ndarray, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        texts = [data[start:stop].tobytes().decode() for start, stop in zip(offsets[:-1], offsets[1:], strict=True)]
        if self.kind == "gpt2":
            lists = self._plain.encode_ordinary_batch(texts)
        else:
            lists = [one.ids for one in self._plain.encode_batch(texts)]
        lengths = np.array([0, *map(len, lists)], np.int64)
        return np.cumsum(lengths), np.concatenate([np.zeros(0, np.uint32), *(np.array(one, np.uint32) for one in lists)])

    def decode(self, tokens: Any) -> str:
        """The text of tokens; bytes that are no whole character show as the replacement character."""
        ids = [int(token) for token in tokens]
        return self._plain.decode(ids) if self.kind == "gpt2" else self._plain.decode(ids, skip_special_tokens=False)


def load(folder: Path, threads: int | None = None) -> Tokenizer:
    """The tokenizer of a vocabulary folder; with one thread it stays on the calling one."""
    return Tokenizer(folder, parallel=threads != 1)


def cuts(data: np.ndarray, start: int, stop: int, part: int = HUGE) -> Iterator[int]:
    """The ends of the parts, of at most `part` bytes, in which the document data[start:stop] is encoded; the last is `stop`."""
    while stop - start > part:
        end = _character(data, start + part)
        start = safe_cut(data, start, end) or end
        yield start
    yield stop


def safe_cut(data: np.ndarray, start: int, end: int) -> int | None:
    """The last place in data[start:end] where a text can be cut without changing its tokens; None if there is none."""
    width = 1 << 12
    while True:
        begin = _character(data, max(start, end - width))
        window = data[begin:end].tobytes().decode()
        if (found := max((match.end() for match in SAFE.finditer(window)), default=None)) is not None:
            return begin + len(window[:found].encode())
        if begin == start:
            return None
        width *= 8


def _character(data: np.ndarray, place: int) -> int:
    """Where the character begins that the byte at `place` is of."""
    while data[place] & 0xC0 == 0x80:
        place -= 1
    return place


# Encoders


def _tiktoken(path: Path) -> Any:
    import tiktoken

    ranks = {a2b_base64(token): int(rank) for token, rank in (line.split() for line in path.read_bytes().splitlines())}
    return tiktoken.Encoding(
        "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={SPECIAL.decode(): GPT2_BOS}, explicit_n_vocab=GPT2_SIZE
    )


def _tokenizers(path: Path, digest: str) -> Any:
    from tokenizers import Tokenizer as Trained

    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}). Delete the folder and make the vocabulary again.") from error
    if f"sha256:{hashlib.sha256(text).hexdigest()}" != digest:
        raise ValueError(f"{path} is not the vocabulary that was recorded. Delete the folder and make the vocabulary again.")
    trained = Trained.from_str(text.decode())
    trained.encode_special_tokens = True  # a special token inside a text is ordinary text
    return trained


def _gigatoken(kind: str, path: Path, parallel: bool) -> Encode:
    import awkward as ak
    import gigatoken
    from awkward.contents import ListOffsetArray, NumpyArray
    from awkward.index import Index64

    if kind == "gpt2":
        tokenizer = gigatoken.Tokenizer.from_tiktoken(path, pretokenizer="gpt2")
    else:
        # Without its added tokens, whose text would be taken out of documents.
        tokenizer = gigatoken.Tokenizer.from_json(json.dumps(json.loads(path.read_text()) | {"added_tokens": []}))

    def encode(offsets: np.ndarray, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        text = NumpyArray(data, parameters={"__array__": "byte"})
        found = tokenizer.encode_batch(
            ak.Array(ListOffsetArray(Index64(offsets), text, parameters={"__array__": "bytestring"})), parallel=None if parallel else False
        ).layout
        ends = np.asarray(found.offsets)
        return ends - ends[0], np.asarray(found.content.data)[ends[0] : ends[-1]]

    return encode
