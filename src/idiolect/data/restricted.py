"""Pickles read without unpickling: their instructions are carried out here, one by one, by a machine that knows plain
containers and NumPy arrays, and can call nothing. For files of other libraries, which hold pickles."""

from __future__ import annotations

import io
import math
import pickletools
import re
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from idiolect.data.stored import BROKEN
from idiolect.errors import UsageError, said

LARGEST = 2**32  # bytes of one file, or of one array's file within a .npz, unpacked
STEPS = 50_000_000  # instructions, and things in what they make
DEEPEST = 32  # containers within containers
NAMES = {
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    **{(f"numpy.{core}.multiarray", name): name for core in ("core", "_core") for name in ("_reconstruct", "scalar")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): "_frombuffer" for core in ("core", "_core")},
}
PLAIN = re.compile(r"b1|[iu][1248]|f[248]|O8?")  # dtypes: numbers and objects, no fields, dates or texts
PUSHES = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
    "BYTEARRAY8", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
}  # fmt: skip
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
MALFORMED = (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, struct.error)


class RefusedError(ValueError):
    """What the file asks for is not plain data."""


class Name:
    """One of `NAMES` that the file mentions: a word for what is to be made, not the thing itself."""

    def __init__(self, word: str) -> None:
        self.word = word


class Unbuilt:
    """An array or a dtype whose state is yet to come; `places` of the memo wait for it."""

    def __init__(self, word: str, spec: str = "") -> None:
        self.word, self.spec = word, spec
        self.places: list[int] = []


def read(file: Path) -> Any:
    """The plain value in a pickle file."""
    return loads(_contents(file), file)


def loads(data: bytes, where: Path) -> Any:
    """The plain value of a pickle: containers, numbers, texts, bytes, NumPy arrays. All else is refused, unread."""
    try:
        return Machine().run(data)
    except RefusedError as error:
        raise _refusal(where, str(error)) from None
    except MALFORMED as error:
        raise _refusal(where, f"a broken pickle ({said(error)})") from None


def npz(file: Path) -> dict[str, Any]:
    """The arrays of an .npz file by their names, those of objects among them."""
    try:
        with ZipFile(io.BytesIO(_contents(file))) as members:
            return {m.filename.removesuffix(".npy"): _npy(_member(members, m), file) for m in members.infolist()}
    except UsageError:
        raise
    except RefusedError as error:
        raise _refusal(file, str(error)) from None
    except BROKEN as error:
        raise UsageError(
            f"Expected a whole .npz file in '{file}', found something else ({said(error)}); copy or make it again."
        ) from None


def _member(members: ZipFile, member: ZipInfo) -> bytes:
    if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        raise RefusedError(f"{member.filename} packed in a way that NumPy does not use")
    if member.file_size > LARGEST:  # as much as `read` unpacks at most
        raise RefusedError(f"{member.filename} of {member.file_size} bytes, more than {LARGEST}")
    return members.read(member)


def _contents(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            data = stream.read(LARGEST + 1)
    except OSError as error:
        raise UsageError(f"Expected a file at '{file}': {error.strerror or error}.") from None
    if len(data) > LARGEST:
        raise _refusal(file, f"more than {LARGEST} bytes")
    return data


def _refusal(where: Path, found: str) -> UsageError:
    return UsageError(
        f"Expected nothing but arrays, numbers, texts and plain containers in '{where}', found {found}; nothing in it "
        "was run. Make the file again with the library that it is from."
    )


def _npy(data: bytes, where: Path) -> Any:
    """The array of an .npy file."""
    stream = io.BytesIO(data)
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise RefusedError(f"an .npy file of version {version}")
    shape, fortran, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(stream)
    rest = data[stream.tell() :]
    if dtype.kind == "O":
        value = loads(rest, where)
        if not isinstance(value, np.ndarray) or value.shape != shape:
            raise RefusedError("a pickle that is not the array announced")
        return value
    return _array(shape, _dtype(dtype.str[1:], dtype.str[0]), rest, fortran)


class Machine:
    """A stack, a memo and the instructions of pickle's protocols 2 to 5 that plain data needs."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for step, (code, argument, _) in enumerate(pickletools.genops(data)):
            if step > STEPS:
                raise RefusedError(f"more than {STEPS} instructions")
            self.do(code.name, argument)
        if len(self.stack) != 1 or self.marks:
            raise RefusedError("a pickle that does not end with one value")
        _check(self.stack[0], 0, [0])
        return self.stack[0]

    def do(self, name: str, argument: Any) -> None:
        if name in PUSHES:
            self.stack.append(_bounded(argument))
        elif name in CONSTANTS:
            self.stack.append(CONSTANTS[name])
        elif name in EMPTY:
            self.stack.append(EMPTY[name]())
        elif name in TUPLES:
            self.stack.append(tuple(self.take(TUPLES[name])))
        elif (instruction := getattr(self, f"do_{name.lower()}", None)) is not None:
            instruction(argument)
        else:
            raise RefusedError(f"the instruction {name}")

    def take(self, count: int) -> list[Any]:
        """The last so many values, none of which lies below the last mark."""
        if count > len(self.stack) - (self.marks[-1] if self.marks else 0):
            raise RefusedError("an instruction without its arguments")
        taken = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return taken

    def marked(self) -> list[Any]:
        """The values above the last mark, which goes with them."""
        start = self.marks.pop()
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise RefusedError(f"an instruction for a {kind.__name__} on a {type(self.stack[-1]).__name__}")
        return self.stack[-1]

    def remember(self, place: int) -> None:
        self.memo[place] = self.stack[-1]
        if isinstance(self.stack[-1], Unbuilt):
            self.stack[-1].places.append(place)

    # the instructions, by pickletools' names

    def do_proto(self, _: Any) -> None: ...
    def do_frame(self, _: Any) -> None: ...
    def do_stop(self, _: Any) -> None: ...

    def do_mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def do_pop(self, _: Any) -> None:
        self.take(1)

    def do_pop_mark(self, _: Any) -> None:
        self.marked()

    def do_tuple(self, _: Any) -> None:
        self.stack.append(tuple(self.marked()))

    def do_append(self, _: Any) -> None:
        items = self.take(1)
        self.top(list).extend(items)

    def do_appends(self, _: Any) -> None:
        items = self.marked()
        self.top(list).extend(items)

    def do_setitem(self, _: Any) -> None:
        key, value = self.take(2)
        self.top(dict)[key] = value

    def do_setitems(self, _: Any) -> None:
        items = self.marked()
        self.top(dict).update(zip(items[::2], items[1::2], strict=True))

    def do_memoize(self, _: Any) -> None:
        self.remember(len(self.memo))

    def do_binput(self, place: int) -> None:
        self.remember(place)

    do_long_binput = do_binput

    def do_binget(self, place: int) -> None:
        self.stack.append(self.memo[place])

    do_long_binget = do_binget

    def do_global(self, names: str) -> None:
        module, _, name = names.partition(" ")
        self.stack.append(_name(module, name))

    def do_stack_global(self, _: Any) -> None:
        self.stack.append(_name(*self.take(2)))

    def do_reduce(self, _: Any) -> None:
        what, arguments = self.take(2)
        if not isinstance(what, Name) or type(arguments) is not tuple:
            raise RefusedError("a call")
        self.stack.append(_made(what.word, arguments))

    def do_build(self, _: Any) -> None:
        unbuilt, state = self.take(2)
        if not isinstance(unbuilt, Unbuilt):
            raise RefusedError(f"a state for a {type(unbuilt).__name__}")
        built = _built(unbuilt, state)
        for place in unbuilt.places:
            self.memo[place] = built
        self.stack.append(built)


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise RefusedError("a number of more than 64 bits")
    return bytes(value) if isinstance(value, bytearray) else value


def _name(module: Any, name: Any) -> Name:
    if (module, name) not in NAMES:
        raise RefusedError(f"the name {module}.{name}"[:200])
    return Name(NAMES[module, name])


def _made(word: str, arguments: tuple[Any, ...]) -> Any:
    """What numpy's functions would make of these arguments."""
    if word == "dtype":
        return Unbuilt("dtype", arguments[0])
    if word == "_reconstruct":
        if not isinstance(arguments[0], Name) or arguments[0].word != "ndarray":
            raise RefusedError("an array of a kind of its own")
        return Unbuilt("array")
    if word == "scalar":
        dtype, data = arguments
        return _array((), _no_object(dtype), data, False)[()]
    if word == "_frombuffer":
        data, dtype, shape, order = arguments
        return _array(shape, _no_object(dtype), bytes(data), order == "F")
    raise RefusedError(f"a call of numpy.{word}")


def _built(unbuilt: Unbuilt, state: Any) -> Any:
    if unbuilt.word == "dtype":
        _, order, *shape_names_fields = state
        if any(part is not None for part in shape_names_fields[:3]):
            raise RefusedError("a dtype with fields")
        return _dtype(unbuilt.spec, order)
    _, shape, dtype, fortran, data = state
    if not isinstance(dtype, np.dtype):
        raise RefusedError("an array without a dtype")
    return (_objects if dtype.kind == "O" else _array)(shape, dtype, data, fortran)


def _dtype(spec: Any, order: Any) -> np.dtype[Any]:
    if not isinstance(spec, str) or not PLAIN.fullmatch(spec) or order not in ("<", ">", "|", "="):
        raise RefusedError(f"a dtype {spec!r}"[:200])
    return np.dtype(spec if order == "|" else order + spec)


def _no_object(dtype: Any) -> np.dtype[Any]:
    if not isinstance(dtype, np.dtype) or dtype.kind == "O":
        raise RefusedError("an object in the place of a number")
    return dtype


def _size(shape: Any) -> int:
    if type(shape) is not tuple or len(shape) > DEEPEST or not all(type(n) is int and n >= 0 for n in shape):
        raise RefusedError(f"an array of shape {shape!r}"[:200])
    return math.prod(shape)


def _array(shape: Any, dtype: np.dtype[Any], data: Any, fortran: Any) -> NDArray[Any]:
    if type(data) is not bytes or len(data) != _size(shape) * dtype.itemsize:
        found = len(data) if type(data) is bytes else type(data).__name__
        raise RefusedError(f"{found} bytes for an array of shape {shape} and {dtype}"[:200])
    if not data:
        return np.empty(shape, dtype)
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def _objects(shape: Any, dtype: np.dtype[Any], items: Any, fortran: Any) -> NDArray[Any]:
    if type(items) is not list or len(items) != _size(shape):
        raise RefusedError(f"another number of objects than an array of shape {shape} has"[:200])
    array = np.empty(len(items), dtype)
    for place, item in enumerate(items):
        array[place] = item
    return array.reshape(shape, order="F" if fortran else "C")


def _check(value: Any, depth: int, seen: list[int]) -> None:
    """Refuse what is not plain to the end, holds itself, or is small on disk and vast when walked through."""
    seen[0] += 1
    if depth > DEEPEST or seen[0] > STEPS:
        raise RefusedError("containers too deep or too many")
    if isinstance(value, dict):
        parts: Iterable[Any] = (part for pair in value.items() for part in pair)
    elif isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, np.ndarray) and value.dtype.kind == "O":
        parts = value.flat
    elif value is None or isinstance(value, bool | int | float | str | bytes | np.generic | np.ndarray):
        return
    else:
        raise RefusedError("a name or an unfinished array in the place of a value")
    for part in parts:
        _check(part, depth + 1, seen)
