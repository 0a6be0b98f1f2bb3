"""GGUF files as users have them: in a folder, in parts, under other names, or not as they think."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf_files
import pytest
from engine_loop import answer, load
from gguf import GGUFEndian, GGUFWriter
from gguf_files import write_gguf, write_parts
from tiny_models import TinyModel, build, generate_with_transformers

from baton.core import model_store
from baton.core.config import Config
from baton.core.errors import InvalidCheckpoint, ModelNotFound
from baton.engine.architecture import read_architecture

TINY = TinyModel("llama")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "models_folder", lambda: tmp_path / "models")


def test_a_name_may_end_in_capitals(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf", build(TINY))
    parts = [tmp_path / f"big-0000{part}-of-00002.GGUF" for part in (1, 2)]
    write_parts(whole, parts)
    one = whole.rename(tmp_path / "TINY.GGUF")
    for file, files in ((one, 1), (parts[1], 2)):
        folder = model_store.locate(str(file))
        assert read_architecture(folder).family == "llama"
        assert len(list(folder.glob("model*.gguf"))) == files
    assert model_store.model_name(Config(model=str(one))) == "TINY"


def test_a_folder_of_gguf_files_names_one_to_give(tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    file = write_gguf(tmp_path / "repository" / "tiny.gguf", build(TINY))
    with pytest.raises(ModelNotFound, match=f"give its GGUF file: {file}"):
        model_store.locate(str(file.parent))


def test_a_model_is_converted_anew_when_any_part_has_changed(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf", build(TINY))
    parts = [tmp_path / f"big-0000{part}-of-00002.gguf" for part in (1, 2)]
    write_parts(whole, parts)
    before = read_architecture(model_store.locate(str(parts[1])))
    longer = TinyModel("llama", {"max_position_embeddings": before.context_length * 2})
    whole = write_gguf(whole, build(longer))
    write_parts(whole, [parts[0], tmp_path / "rest.gguf"])
    after = read_architecture(model_store.locate(str(parts[1])))
    assert after.context_length == before.context_length * 2


def test_a_big_endian_file_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def writer(path: Path, architecture: str) -> GGUFWriter:
        return GGUFWriter(path, architecture, endianess=GGUFEndian.BIG)

    monkeypatch.setattr(gguf_files, "GGUFWriter", writer)
    file = write_gguf(tmp_path / "tiny.gguf", build(TINY))
    with pytest.raises(InvalidCheckpoint, match="it is big-endian"):
        model_store.locate(str(file))


def add_nested(writer: GGUFWriter) -> None:
    writer.add_array("general.notes", [[[1, 2], [3]], [[4]], [["four", "five"]]])
    writer.add_uint32("general.count", 5)


def add_latin(writer: GGUFWriter) -> None:
    writer.add_string("general.LATIN", "n")


@pytest.mark.parametrize("extra", [add_nested, add_latin])
def test_fields_that_are_not_used_may_hold_anything(
    extra: Callable[[GGUFWriter], None], tmp_path: Path
) -> None:
    """Arrays of arrays, and names that are not UTF-8."""
    oracle = build(TINY)
    file = write_gguf(tmp_path / "tiny.gguf", oracle, extra=extra)
    file.write_bytes(file.read_bytes().replace(b"LATIN", b"caf\xe9s"))
    answers = answer(load(model_store.locate(str(file))), [1, 2, 3], 8)
    assert answers == generate_with_transformers(oracle, [1, 2, 3], 8)


def test_an_array_of_arrays_in_a_field_that_is_used_is_named(tmp_path: Path) -> None:
    def vocabulary(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_array("tokenizer.ggml.tokens", [["a"], ["b"]])

    file = write_gguf(tmp_path / "tiny.gguf", build(TINY), vocabulary=vocabulary)
    with pytest.raises(InvalidCheckpoint, match=r"tokenizer\.ggml\.tokens is broken: .*of arrays"):
        model_store.locate(str(file))


def test_arrays_that_are_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    arrays, depth = struct.pack("<IQ", 9, 1), 10_000
    field = struct.pack("<Q1sI", 1, b"x", 9) + depth * arrays + struct.pack("<IQ", 4, 0)
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field)
    with pytest.raises(InvalidCheckpoint, match="is not a whole GGUF file"):
        model_store.locate(str(file))


def test_a_pointer_of_git_lfs_is_called_so(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(InvalidCheckpoint, match="git lfs pull"):
        model_store.locate(str(file))
