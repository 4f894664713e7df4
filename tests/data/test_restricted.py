"""Pickles that are read without unpickling: what plain data gives, and that nothing else gives anything."""

import io
import os
import pickle
import pickletools
import struct
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from idiolect.data import restricted
from idiolect.errors import UsageError

HERE = Path("a file.pkl")
PROTOCOLS = [3, 4, 5]

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inside: (
        st.lists(inside) | st.tuples(inside, inside) | st.dictionaries(st.text() | st.integers(-9, 9), inside)
    ),
    max_leaves=20,
)
dtypes = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes()
    | hnp.unsigned_integer_dtypes()
    | hnp.floating_dtypes(sizes=(16, 32, 64))
)
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))


@given(plain, st.sampled_from(PROTOCOLS))
def test_plain_values_come_as_they_were_pickled(value, protocol):
    found = restricted.loads(pickle.dumps(value, protocol), HERE)
    assert found == value
    assert repr(found) == repr(value)  # 1, 1.0 and True are equal


@given(arrays, st.sampled_from(PROTOCOLS), st.booleans())
def test_arrays_come_as_they_were_pickled(array, protocol, fortran):
    array = np.asfortranarray(array) if fortran else array
    scalars = list(array.ravel()[:3])
    found, again, singles = restricted.loads(pickle.dumps([array, array, scalars], protocol), HERE)
    for one in (found, again):
        np.testing.assert_array_equal(one, array)
        assert (one.dtype, one.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(np.array(singles), np.array(scalars))
    assert [type(s) for s in singles] == [type(s) for s in scalars]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("core", [b"numpy.core", b"numpy._core"])
def test_numpy_before_its_second_version_is_read_too(protocol, core):
    value = {"x": np.arange(6.0).reshape(2, 3), "n": np.int64(3)}
    data = pickle.dumps(value, protocol)
    own = np.ndarray.__reduce__(value["x"])[0].__module__.encode().rpartition(b".")[0]
    if protocol > 3:  # names have their length before them, and stand in frames
        data = pickle.dumps(value, 3).replace(b"\x80\x03", bytes([0x80, protocol]))
    found = restricted.loads(data.replace(own + b".", core + b"."), HERE)
    np.testing.assert_array_equal(found["x"], value["x"])
    assert found["n"] == 3


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_files_with_objects(tmp_path, save):
    ragged = np.empty((2, 2), object)
    ragged[:] = [[[1, 2], 2], [[3], 1]]
    held = {"data": {"x": np.ones((2, 3), "f4"), "y": np.array([0, 1])}, "pairs": ragged, "plain": np.arange(4)}
    save(tmp_path / "0.npz", **held)
    found = restricted.npz(tmp_path / "0.npz")
    assert found.keys() == held.keys()
    assert found["data"].shape == ()
    np.testing.assert_array_equal(found["data"][()]["x"], held["data"]["x"])
    assert found["pairs"].tolist() == ragged.tolist()
    assert found["plain"].tolist() == [0, 1, 2, 3]


# what is refused


class Calls:
    """A pickle that calls something when it is unpickled."""

    def __init__(self, function, *arguments):
        self.what = (function, arguments)

    def __reduce__(self):
        return self.what


def poisons(mark):
    code = f"open({str(mark)!r}, 'w').close()"
    yield "os.system", Calls(os.system, f"touch '{mark}'")
    yield "eval", Calls(eval, code)
    yield "exec in a list in a dict", {"x": [1, Calls(exec, code)]}
    yield "open", Calls(open, str(mark), "w")
    yield "getattr", Calls(getattr, Calls(eval, code), "__class__")
    yield "Path.touch", Calls(Path.touch, mark)
    yield "an object array", np.array([1, Calls(eval, code)], dtype=object)
    yield "beside arrays", {"x": np.arange(3), "y": Calls(eval, code)}


NAMES = [name for name, _ in poisons(Path("x"))]


@pytest.mark.parametrize("protocol", [2, *PROTOCOLS])
@pytest.mark.parametrize("name", NAMES)
def test_what_would_run_is_refused_and_not_run(tmp_path, name, protocol):
    mark = tmp_path / "ran"
    data = pickle.dumps(dict(poisons(mark))[name], protocol)
    pickle.loads(data)
    assert mark.exists()  # so it would have
    mark.unlink()
    with pytest.raises(UsageError, match="nothing in it was run"):
        restricted.loads(data, HERE)
    assert not mark.exists()


@pytest.mark.parametrize("name", NAMES)
def test_nor_is_it_run_from_an_npz_file(tmp_path, name):
    mark = tmp_path / "ran"
    np.savez_compressed(tmp_path / "0.npz", data=np.array(dict(poisons(mark))[name], dtype=object))
    with pytest.raises(UsageError, match=r"0\.npz.*nothing in it was run"):
        restricted.npz(tmp_path / "0.npz")
    assert not mark.exists()


def op(name, argument=b""):
    return next(o for o in pickletools.opcodes if o.name == name).code.encode("latin-1") + argument


def text(word):
    return op("SHORT_BINUNICODE", bytes([len(word)]) + word.encode())


def named(module, name):
    return text(module) + text(name) + op("STACK_GLOBAL")


def program(*parts):
    return op("PROTO", b"\x04") + b"".join(parts) + op("STOP")


MULTIARRAY = "numpy._core.multiarray"
INT8 = named("numpy", "dtype") + text("i1") + op("TUPLE1") + op("REDUCE")
MINUS = op("BININT", struct.pack("<i", -1))
NONES = op("NONE") * 3
STATE = (
    op("MARK")
    + op("BININT1", b"\x03")
    + text("|")
    + NONES
    + MINUS * 2
    + op("BININT1", b"\0")
    + op("TUPLE")
    + op("BUILD")
)
SHAPE = lambda *sides: op("MARK") + b"".join(op("LONG1", b"\x08" + struct.pack("<q", n)) for n in sides) + op("TUPLE")
BYTES = lambda data: op("SHORT_BINBYTES", bytes([len(data)]) + data)
HALF = (
    named(MULTIARRAY, "_reconstruct") + named("numpy", "ndarray") + SHAPE(0) + BYTES(b"b") + op("TUPLE3") + op("REDUCE")
)
ARRAY = lambda shape, data, dtype=INT8 + STATE: (
    HALF + op("MARK") + op("BININT1", b"\x01") + shape + dtype + op("NEWFALSE") + data + op("TUPLE") + op("BUILD")
)


def test_the_programs_written_here_are_right():
    data = program(ARRAY(SHAPE(3), BYTES(b"abc")))
    assert restricted.loads(data, HERE).tolist() == pickle.loads(data).tolist() == [97, 98, 99]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (program(named("os", "system")), "name os.system"),
        (program(named("numpy", "ndarray.__class__")), "name numpy.ndarray.__class__"),
        (program(named(MULTIARRAY, "_reconstruct.__globals__")), "_reconstruct.__globals__"),
        (program(named("numpy", "load")), "name numpy.load"),
        (program(named("numpy", "ndarray")), "a name or an unfinished array"),
        (program(op("NONE"), op("NONE"), op("STACK_GLOBAL")), "name None.None"),
        (program(op("EMPTY_LIST"), op("EMPTY_LIST"), op("STACK_GLOBAL")), "broken pickle"),
        (program(op("GLOBAL", b"posix\nsystem\n")), "name posix.system"),
        (program(op("MARK"), text("ls"), op("INST", b"posix\nsystem\n")), "instruction INST"),
        (program(named("numpy", "ndarray"), op("EMPTY_TUPLE"), op("NEWOBJ")), "instruction NEWOBJ"),
        (program(op("MARK"), named("numpy", "ndarray"), op("OBJ")), "instruction OBJ"),
        (program(op("PERSID", b"1\n")), "instruction PERSID"),
        (program(text("1"), op("BINPERSID")), "instruction BINPERSID"),
        (program(op("EXT1", b"\x01")), "instruction EXT1"),
        (program(op("NEXT_BUFFER")), "instruction NEXT_BUFFER"),
        (program(named("numpy", "ndarray"), SHAPE(3), op("REDUCE")), "call of numpy.ndarray"),
        (program(text("eval"), op("EMPTY_TUPLE"), op("REDUCE")), "found a call"),
        (program(op("EMPTY_LIST"), op("EMPTY_DICT"), op("BUILD")), "a state for a list"),
        (program(named("numpy", "dtype"), op("EMPTY_DICT"), op("BUILD")), "a state for a Name"),
        (program(ARRAY(SHAPE(3), BYTES(b"abc")), op("EMPTY_DICT"), op("BUILD")), "a state for a ndarray"),
        (program(HALF), "unfinished array"),
        (program(op("EMPTY_LIST"), HALF, op("APPEND")), "unfinished array"),
        (program(ARRAY(SHAPE(4), BYTES(b"abc"))), "3 bytes for an array of shape"),
        (program(ARRAY(SHAPE(2**40, 2**40), BYTES(b"abc"))), "3 bytes for an array of shape"),
        (program(ARRAY(SHAPE(-3, -1), BYTES(b"abc"))), "array of shape"),
        (program(ARRAY(op("BININT1", b"\x03"), BYTES(b"abc"))), "array of shape 3"),
        (program(ARRAY(SHAPE(3), op("EMPTY_LIST"))), "list bytes for an array"),
        (program(ARRAY(SHAPE(3), BYTES(b"abc"), INT8)), "array without a dtype"),
        (program(ARRAY(SHAPE(3), BYTES(b"abc"), INT8.replace(b"i1", b"O8") + STATE)), "another number of objects"),
        (program(INT8.replace(b"i1", b"M8"), STATE), "a dtype 'M8'"),
        (program(INT8.replace(b"i1", b"V9"), STATE), "a dtype 'V9'"),
        (program(INT8, STATE.replace(NONES, op("EMPTY_TUPLE") * 3)), "a dtype with fields"),
        (program(op("APPEND")), "without its arguments"),
        (program(op("MARK"), op("NONE"), op("APPENDS")), "broken pickle"),
        (program(op("NONE"), op("MARK"), op("TUPLE1")), "without its arguments"),
        (program(op("BINGET", b"\x07")), "broken pickle"),
        (program(op("NONE"), op("NONE")), "does not end with one value"),
        (program(), "does not end with one value"),
        (program(op("LONG4", struct.pack("<i", 2**30))), "broken pickle"),
        (program(op("LONG1", b"\x20" + b"\x7f" * 32)), "more than 64 bits"),
        (program(op("BINBYTES8", struct.pack("<Q", 2**62))), "broken pickle"),
        (program(op("EMPTY_LIST"), op("BINPUT", b"\0"), op("BINGET", b"\0"), op("APPEND")), "too deep or too many"),
        (program(*[op("EMPTY_LIST") for _ in range(40)], *[op("APPEND") for _ in range(39)]), "too deep or too many"),
        (program(op("EMPTY_DICT"), op("EMPTY_LIST"), op("NONE"), op("SETITEM")), "broken pickle"),
        (program(op("EMPTY_DICT"), op("MARK"), op("NONE"), op("SETITEMS")), "broken pickle"),
        (program(op("SHORT_BINUNICODE", b"\x01\xff")), "broken pickle"),
        (b"", "broken pickle"),
        (b"hello", "broken pickle"),
        (pickle.dumps([1, 2])[:-1], "broken pickle"),
        (pickle.dumps({1}), "instruction EMPTY_SET"),
        (pickle.dumps(OrderedDict(a=1)), "name collections.OrderedDict"),
        (pickle.dumps(Counter(a=1)), "name collections.Counter"),
        (pickle.dumps(range(3)), "name builtins.range"),
        (pickle.dumps(np.array(["2026"], "M8[D]")), "a dtype 'M8'"),
        (pickle.dumps(np.zeros(2, [("a", "i4")])), "a dtype with fields"),
        (pickle.dumps(np.ma.array([1])), "name numpy.ma"),
        (pickle.dumps(1, 0), "instruction INT"),
    ],
)  # fmt: skip
def test_what_is_not_plain_data_is_refused(data, found):
    with pytest.raises(UsageError, match=found) as error:
        restricted.loads(data, HERE)
    assert "'a file.pkl'" in str(error.value)
    assert "nothing in it was run" in str(error.value)
    assert "\n" not in str(error.value)


def test_small_files_do_not_become_vast(monkeypatch):
    far = program(op("NONE"), op("LONG_BINPUT", struct.pack("<I", 2**32 - 1)))
    assert restricted.loads(far, HERE) is None  # Python's own reader makes room for as many
    monkeypatch.setattr(restricted, "STEPS", 10_000)
    twice = op("MEMOIZE") + op("BINGET", b"%c") + op("TUPLE2")
    laughs = program(op("EMPTY_LIST"), *[twice.replace(b"%c", bytes([k])) for k in range(25)])
    assert len(laughs) < 200
    with pytest.raises(UsageError, match="too deep or too many"):
        restricted.loads(laughs, HERE)
    with pytest.raises(UsageError, match="more than 10000 instructions"):
        restricted.loads(pickle.dumps(list(range(20_000))), HERE)


def test_files_have_a_size_that_they_must_not_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(restricted, "LARGEST", 5000)
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros(100_000))
    assert (tmp_path / "bomb.npz").stat().st_size < 5000
    with pytest.raises(UsageError, match=r"x\.npy of 800128 bytes, more than 5000"):
        restricted.npz(tmp_path / "bomb.npz")
    (tmp_path / "long.pkl").write_bytes(pickle.dumps(bytes(6000)))
    with pytest.raises(UsageError, match="more than 5000 bytes"):
        restricted.read(tmp_path / "long.pkl")


def saved(**arrays):
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def zipped(kind=zipfile.ZIP_STORED, **members):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", kind) as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)
    return stream.getvalue()


def header(about):
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(about)) + about


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "whole .npz file"),
        (b"PK\x03\x04 and no more", "whole .npz file"),
        (saved(x=np.arange(9))[:-40], "whole .npz file"),
        (saved(x=np.arange(9)).replace(struct.pack("<q", 7), struct.pack("<q", 6)), "whole .npz file"),
        (zipped(x=b"no array"), "whole .npz file"),
        (zipped(x=header(b"{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999,)}\n")), "0 bytes for an array"),
        (zipped(x=header(b"{'descr': '<M8[s]', 'fortran_order': False, 'shape': (1,)}\n") + bytes(8)), "a dtype"),
        (zipped(x=header(b"__import__('os').system('ls')\n")), "whole .npz file"),
        (zipped(x=header(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n") + pickle.dumps([1])), "not the array announced"),
        (zipped(zipfile.ZIP_LZMA, x=b"abc"), "packed in a way"),
    ],
)  # fmt: skip
def test_broken_npz_files_are_refused(tmp_path, data, found):
    (tmp_path / "ä 0.npz").write_bytes(data)
    with pytest.raises(UsageError, match=found) as error:
        restricted.npz(tmp_path / "ä 0.npz")
    assert "ä 0.npz" in str(error.value)


def test_files_that_are_not_there(tmp_path):
    for read in (restricted.read, restricted.npz):
        with pytest.raises(UsageError, match=r"Expected a file at .*no\.npz': No such file"):
            read(tmp_path / "no.npz")


# fuzzed

ALLOWED = (dict, list, tuple, str, bytes, int, float, type(None), np.ndarray, np.generic)


def walk(value):
    yield value
    if isinstance(value, dict):
        value = [*value, *value.values()]
    elif isinstance(value, np.ndarray):
        value = list(value.flat) if value.dtype.kind == "O" else []
    for part in value if isinstance(value, list | tuple) else ():
        yield from walk(part)


def plain_or_refused(data):
    try:
        found = restricted.loads(data, HERE)
    except UsageError:
        return
    assert all(isinstance(part, ALLOWED) for part in walk(found))


@given(st.binary(max_size=200))
def test_any_bytes_are_plain_or_refused(data):
    plain_or_refused(data)
    plain_or_refused(b"\x80\x04" + data + b".")


SEEDS = [
    pickle.dumps({"x": np.arange(4, dtype="f4"), "y": [np.int64(1), (2, "a")], "o": np.array([[1], None], object)}, p)
    for p in PROTOCOLS
]


@settings(max_examples=300)
@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=4), st.integers(0, 4)), max_size=6),
)
def test_altered_pickles_are_plain_or_refused(data, changes):
    for place, piece, gone in changes:
        data = data[:place] + piece + data[place + gone :]
    plain_or_refused(data)


PIECES = [
    *(op(n) for n in ("MARK", "TUPLE", "TUPLE1", "TUPLE2", "REDUCE", "BUILD", "APPEND", "APPENDS", "SETITEM", "MEMOIZE", "POP")),
    op("EMPTY_LIST"), op("EMPTY_DICT"), op("NONE"), op("BINGET", b"\0"), op("BINGET", b"\1"), text("O8"), text("|"),
    named("numpy", "dtype"), named("numpy", "ndarray"), named(MULTIARRAY, "scalar"), named("numpy.core.numeric", "_frombuffer"),
    INT8, STATE, HALF, SHAPE(1), BYTES(b"a"), ARRAY(SHAPE(1), BYTES(b"a")),
]  # fmt: skip


@settings(max_examples=500)
@given(st.lists(st.sampled_from(PIECES), max_size=15))
def test_any_sequence_of_allowed_instructions_is_plain_or_refused(parts):
    plain_or_refused(program(*parts))
