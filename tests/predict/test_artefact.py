"""Model files: what is written is read back, and whatever is not a model of ours is refused."""

import io
import json
import pickle
import struct
import tracemalloc
import zipfile
from contextlib import suppress
from hashlib import sha256
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import pytest

from heddle_predict.artefact import SCHEMA, VERSION, read_artefact, write_artefact
from heddle_predict.errors import PredictError
from heddle_predict.examples import answers, examples
from heddle_predict.models import TreesModel, model_from
from heddle_predict.play import Pace
from heddle_predict.shipped import COMMAND, SEED, shipped_model
from heddle_trace.workloads import WORKLOADS
from tests.predict.made import artefact, fitted, synthetic


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.heddle"
    write_artefact(path, artefact())
    return path


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def rewritten(path: Path, changes: dict[str, bytes | None]) -> None:
    """Replace or drop members, as with an editor."""
    found = members(path) | changes
    with zipfile.ZipFile(path, "w") as opened:
        for name, data in found.items():
            if data is not None:
                opened.writestr(name, data)


def with_header(path: Path, **changes: object) -> None:
    header = json.loads(members(path)["header.json"]) | changes
    rewritten(path, {"header.json": json.dumps(header).encode()})


def test_what_was_written_is_read_back(file):
    found = read_artefact(file)
    kept = msgspec.structs.replace(found.header, hashes={})
    assert kept == artefact().header
    assert found.arrays.keys() == artefact().arrays.keys()
    for name, array in found.arrays.items():
        assert array.dtype == artefact().arrays[name].dtype
        assert np.array_equal(array, artefact().arrays[name])
    asked = examples(synthetic().scripts, fitted().vocabulary, Pace())
    model = model_from(found, file)
    assert np.array_equal(answers(model, asked), answers(fitted(), asked))


def test_equal_models_are_equal_files(file, tmp_path):
    again = tmp_path / "again.heddle"
    assert write_artefact(again, artefact()) == read_artefact(file).sha256
    assert again.read_bytes() == file.read_bytes()


def test_no_member_is_a_pickle_and_none_would_be_loaded(file):
    for name, data in members(file).items():
        assert name == "header.json" or data.startswith(b"\x93NUMPY"), name
    out = io.BytesIO()
    np.save(out, np.array([print], dtype=object), allow_pickle=True)
    evil = out.getvalue()
    assert pickle.dumps(print)[2:] in evil or b"print" in evil
    header = json.loads(members(file)["header.json"])
    header["hashes"]["arrays/errors.npy"] = sha256(evil).hexdigest()
    rewritten(file, {"arrays/errors.npy": evil, "header.json": json.dumps(header).encode()})
    with pytest.raises(PredictError, match=r"damaged: arrays/errors\.npy"):
        read_artefact(file)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_file_cut_short_is_refused(file, share):
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    with pytest.raises(PredictError, match=r"model\.heddle: damaged or cut short"):
        read_artefact(file)


def test_every_flipped_byte_is_seen_or_harmless(file):
    data = file.read_bytes()
    good = read_artefact(file)
    for at in range(0, len(data), 997):
        file.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        with suppress(PredictError):
            found = read_artefact(file)
            assert all(np.array_equal(found.arrays[n], a) for n, a in good.arrays.items())


@pytest.mark.parametrize("content", [b"", b"hello\n", b'{"trajectory_id": "a"}\n', b"\x80\x04."])
def test_what_is_not_a_model_at_all_is_refused(tmp_path, content):
    path = tmp_path / "other.heddle"
    path.write_bytes(content)
    with pytest.raises(PredictError, match="not a model of Heddle; `heddle predict fit` makes one"):
        read_artefact(path)


def test_a_zip_of_something_else_is_refused(tmp_path):
    path = tmp_path / "other.heddle"
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("a.txt", "hello")
    with pytest.raises(PredictError, match=r"not a model of Heddle \(it has no header.json\)"):
        read_artefact(path)
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("header.json", '{"a": ' + "[" * 5_000)
    with pytest.raises(PredictError, match="its schema is ''"):
        read_artefact(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, 93])
def test_a_member_that_says_it_is_packed_otherwise_is_damage(file, method):
    data = bytearray(file.read_bytes())
    entry = data.index(b"PK\1\2")  # of the first member, in the directory at the end
    data[entry + 10 : entry + 12] = method.to_bytes(2, "little")
    file.write_bytes(bytes(data))
    with pytest.raises(PredictError, match=f"damaged or cut short .* is packed by method {method}"):
        read_artefact(file)


def test_a_newer_version_is_refused_with_the_remedy(file):
    with_header(file, schema=f"{SCHEMA}/{VERSION + 1}", something_new=1)
    with pytest.raises(PredictError, match=r"newer than the heddle.model/1 .* update Heddle"):
        read_artefact(file)


@pytest.mark.parametrize("schema", ["heddle.trace/1", "heddle.model", "heddle.model/x", ""])
def test_another_schema_is_refused(file, schema):
    with_header(file, schema=schema)
    with pytest.raises(PredictError, match=f"its schema is '{schema}', not heddle.model/1"):
        read_artefact(file)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "sequence"}, "a model of kind 'sequence', and this Heddle reads trees alone"),
        ({"seed": "one"}, "header.json: Expected `int`"),
        ({"unknown": 1}, "header.json: Object contains unknown field"),
        ({"levels": [0.9, 0.1]}, "no rising probabilities"),
        ({"levels": [0.0, 0.5]}, "no rising probabilities"),
        ({"features": ["steps", "mood"]}, r"other features than this version observes \(mood\)"),
        ({"tools": []}, "other features than this version observes"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(file, changes, said):
    with_header(file, **changes)
    with pytest.raises(PredictError, match=said):
        read_artefact(file)


def test_levels_below_a_token_are_refused(file):
    header = json.loads(members(file)["header.json"])
    header["anywhere"]["total_tokens"] = 0.0
    rewritten(file, {"header.json": json.dumps(header).encode()})
    with pytest.raises(PredictError, match="must be 1 token or more"):
        read_artefact(file)


def test_a_member_that_is_gone_or_changed_is_named(file):
    rewritten(file, {"arrays/errors.npy": b"other"})
    with pytest.raises(PredictError, match=r"arrays/errors.npy is not what was written"):
        read_artefact(file)
    rewritten(file, {"arrays/errors.npy": None})
    with pytest.raises(PredictError, match=r"should hold 'arrays/errors.npy', and does not"):
        read_artefact(file)


def test_a_path_out_of_the_file_is_refused(file):
    header = json.loads(members(file)["header.json"])
    header["hashes"]["arrays/../../evil"] = "0" * 64
    rewritten(file, {"header.json": json.dumps(header).encode(), "arrays/../../evil": b"x"})
    with pytest.raises(PredictError, match="should hold"):
        read_artefact(file)


@pytest.mark.parametrize(
    "name",
    [
        "arrays/",
        "arrays/.",
        "arrays/./errors.npy",
        "arrays/a/../errors.npy",
        "arrays/C:/errors.npy",
        "arrays/a\\errors.npy",
        "arrays//errors.npy",
        "files/errors.npy",
        "header.json",
        "/etc/passwd",
    ],
)
def test_a_member_that_is_no_array_is_refused(file, name):
    header = json.loads(members(file)["header.json"])
    header["hashes"][name] = sha256(b"x").hexdigest()
    changes = {name: b"x", "header.json": json.dumps(header).encode()}
    rewritten(file, changes)
    with pytest.raises(PredictError, match=r"model.heddle: damaged: .* no array of a model"):
        read_artefact(file)


def test_a_directory_that_names_wrong_places_is_damage(file):
    data = file.read_bytes()
    entry, end = data.index(b"PK\x01\x02"), data.rindex(b"PK\x05\x06")
    places = [entry + 24, entry + 42, end + 12, end + 16]  # sizes and offsets
    for at, value in product(places, (1, 2**31, 2**32 - 2)):
        file.write_bytes(data[:at] + struct.pack("<I", value) + data[at + 4 :])
        with pytest.raises(PredictError, match=r"model.heddle: (damaged|not a model)"):
            read_artefact(file)


def test_a_small_file_that_would_unpack_to_a_large_one_is_refused_before_it_does(file):
    zeros = bytes(160 << 20)
    header = json.loads(members(file)["header.json"])
    header["hashes"]["arrays/zeros.npy"] = sha256(zeros).hexdigest()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as opened:
        opened.writestr("header.json", json.dumps(header))
        opened.writestr("arrays/zeros.npy", zeros)
    del zeros
    tracemalloc.start()
    try:
        with pytest.raises(PredictError, match=r"it would unpack to 167,7.* bytes, and a model"):
            read_artefact(file)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_an_array_whose_shape_takes_more_than_there_is_is_refused_before_it_is_made(file):
    array = members(file)["arrays/errors.npy"]
    shape = array.partition(b"'shape': (")[2].partition(b")")[0]
    huge = array.replace(b"'shape': (" + shape, b"'shape': (800000000,".ljust(10 + len(shape)))
    header = json.loads(members(file)["header.json"])
    header["hashes"]["arrays/errors.npy"] = sha256(huge).hexdigest()
    rewritten(file, {"arrays/errors.npy": huge, "header.json": json.dumps(header).encode()})
    with pytest.raises(PredictError, match=r"errors.npy has not the size that its shape takes"):
        read_artefact(file)


def test_arrays_that_do_not_fit_each_other_are_refused(file):
    found = read_artefact(file)
    good = dict(found.arrays)
    for name, bad in [
        ("errors", good["errors"][:3]),
        ("errors", good["errors"][::-1].copy()),
        ("errors", good["errors"].astype(np.float32)),
        ("location.leaf", good["location.leaf"][:, :2]),
    ]:
        object.__setattr__(found, "arrays", good | {name: bad})
        with pytest.raises(PredictError, match=r"model.heddle: damaged: "):
            model_from(found, file)
    object.__setattr__(found, "arrays", {k: v for k, v in good.items() if k != "errors"})
    with pytest.raises(PredictError, match="holds no array 'errors'"):
        model_from(found, file)


def test_a_folder_and_another_suffix_are_refused(tmp_path):
    with pytest.raises(PredictError, match="is a folder"):
        read_artefact(tmp_path)
    with pytest.raises(PredictError, match=r"must be named \*.heddle"):
        write_artefact(tmp_path / "model.pkl", artefact())
    assert list(tmp_path.iterdir()) == []


def test_the_shipped_model_is_whole_and_names_its_origin():
    found = read_artefact(shipped_model())
    header = found.header
    assert header.command == COMMAND
    assert header.seed == SEED
    assert sorted(header.tasks) == sorted(WORKLOADS)
    assert [t.name.split("-")[1] for t in header.trained_on] == list(WORKLOADS)
    assert isinstance(model_from(found, shipped_model()), TreesModel)
