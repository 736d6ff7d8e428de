"""Checkpoints: what was saved comes back, damage is named, and a crash leaves the old file."""

import numpy as np
import pytest

from models import checkpoint

ARRAYS = {
    "blocks.0.mixer.q": np.arange(12, dtype=np.float32).reshape(3, 4),
    "step": np.array(7, np.int64),
    "empty": np.zeros((0, 3), np.float32),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
}


def test_what_was_saved_comes_back(tmp_path):
    path = tmp_path / "deep" / "weights.safetensors"
    checkpoint.save(path, ARRAYS, {"step": "7"})
    arrays, metadata = checkpoint.load(path)
    assert metadata == {"step": "7"}
    assert set(arrays) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype and arrays[name].shape == array.shape and (arrays[name] == array).all()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_same_arrays_give_the_same_bytes(tmp_path):
    checkpoint.save(tmp_path / "a", ARRAYS, {"x": "1", "y": "2"})
    checkpoint.save(tmp_path / "b", dict(reversed(ARRAYS.items())), {"y": "2", "x": "1"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing", "text"])
def test_damage_is_named(tmp_path, damage):
    path = tmp_path / "weights.safetensors"
    checkpoint.save(path, ARRAYS)
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(data[:-5])
    elif damage == "flipped":
        data[-3] ^= 1
        path.write_bytes(data)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "missing":
        path.unlink()
    else:
        path.write_text("not a checkpoint at all, but long enough to look like one")
    with pytest.raises(ValueError, match="weights.safetensors"):
        checkpoint.load(path)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "weights.safetensors"
    checkpoint.save(path, {"x": np.ones(3, np.float32)})

    def full(*arguments, **options):
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="space"):
        checkpoint.save(path, {"x": np.zeros(3, np.float32)})
    assert (checkpoint.load(path)[0]["x"] == 1).all()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_file_of_another_origin_is_refused(tmp_path):
    checkpoint.save_file({"x": np.ones(3, np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="other.safetensors"):
        checkpoint.load(tmp_path / "other.safetensors")


def test_metadata_is_text(tmp_path):
    with pytest.raises(ValueError, match="must be text"):
        checkpoint.save(tmp_path / "x", ARRAYS, {"step": 7})


def test_what_several_processes_wrote_is_whole_or_refused(tmp_path):
    """Pieces along an axis, in as many files; a part of another save, a missing part and a gap are named."""
    whole = {"a": np.arange(24, dtype=np.float32).reshape(4, 6), "b": np.ones(3, np.float32)}
    path, facts = tmp_path / "00000007.safetensors", {"step": "7", checkpoint.SAVE: "x"}
    first = {checkpoint.piece("a", 1, 0, 6): whole["a"][:, :2], checkpoint.piece("a", 1, 4, 6): whole["a"][:, 4:], "b": whole["b"]}
    rest = {checkpoint.piece("a", 1, 2, 6): whole["a"][:, 2:4]}
    checkpoint.save(checkpoint.part(path, 1), rest, facts)
    checkpoint.save(path, first, facts | {checkpoint.PARTS: "1"})
    found, metadata = checkpoint.load_together(path)
    assert metadata["step"] == "7" and found.keys() == whole.keys() and all((found[name] == whole[name]).all() for name in whole)
    checkpoint.save(checkpoint.part(path, 1), rest, facts | {checkpoint.SAVE: "y"})
    with pytest.raises(ValueError, match="00000007.1.safetensors was not written together"):
        checkpoint.load_together(path)
    checkpoint.part(path, 1).unlink()
    with pytest.raises(ValueError, match="00000007.1.safetensors"):
        checkpoint.load_together(path)
    checkpoint.save(path, first, facts)
    with pytest.raises(ValueError, match="pieces of 'a' that do not make a whole"):
        checkpoint.load_together(path)
