"""Malicious pickles: every opcode that can reach a callable, plain and within files of torch."""

import io
import os
import pickle
import pickletools
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata


@dataclass(frozen=True)
class Payload:
    """The bytes of a file that would run something."""

    name: str
    data: bytes


class Calls:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


class CallsAndBuilds(Calls):
    """A call whose result is given a state: `__setstate__` or the `__dict__` of what it returned."""

    def __reduce__(self) -> Any:
        return (*self._call, {"__class__": dict, "x": 1})


class Appends(Calls):
    """A harmless list whose items are calls."""

    def __reduce__(self) -> Any:
        function, arguments = self._call
        return list, (), None, iter([Calls(function, *arguments)]), None


class Keeps(Calls):
    """A harmless dict whose values are calls."""

    def __reduce__(self) -> Any:
        function, arguments = self._call
        return dict, (), None, None, iter([("key", Calls(function, *arguments))])


def shell(canary: Path) -> str:
    return f"touch {canary}"


def calls(canary: Path) -> dict[str, Any]:
    """Objects whose unpickling makes the file `canary`."""
    command, code = shell(canary), f"open({str(canary)!r}, 'w').close()"
    inner = pickle.dumps(Calls(os.system, command))
    return {
        "os.system": Calls(os.system, command),
        "eval": Calls(eval, code),
        "exec": Calls(exec, code),
        "subprocess": Calls(subprocess.call, ["touch", str(canary)]),
        "open for writing": Calls(open, str(canary), "w"),
        "os.mkdir": Calls(os.mkdir, str(canary)),
        "nested pickle": Calls(pickle.loads, inner),
        "call with state": CallsAndBuilds(os.system, command),
        "list item": Appends(os.system, command),
        "dict value": Keeps(os.system, command),
        "inside a tuple": (1, {"a": [Calls(os.system, command)]}),
        "torch.load": Calls(torch.load, io.BytesIO(inner)),
        "getattr": Calls(getattr, os, "system"),
        "__import__": Calls(__import__, "this"),
        "print": Calls(print, "unpickled"),
    }


_META = b"torch.distributed.checkpoint.metadata"


def _short(text: bytes) -> bytes:
    """SHORT_BINUNICODE."""
    return b"\x8c" + bytes([len(text)]) + text


def opcodes(canary: Path) -> dict[str, bytes]:
    """Hand-made pickles: each reaches a callable by another opcode."""
    text = shell(canary).encode()
    short, name = _short(text), _short(b"os") + _short(b"system")
    return {
        "GLOBAL REDUCE": b"cos\nsystem\n(" + short + b"tR.",
        "GLOBAL posix": b"cposix\nsystem\n(" + short + b"tR.",
        "INST": b"(" + short + b"ios\nsystem\n.",
        "OBJ": b"(cos\nsystem\n" + short + b"o.",
        "STACK_GLOBAL": b"\x80\x04" + name + b"\x93(" + short + b"tR.",
        "STACK_GLOBAL dotted": b"\x80\x04\x8c\x08builtins\x8c\x0fpickle.os.system\x93(" + short + b"tR.",
        "NEWOBJ": b"\x80\x02cos\nsystem\n(" + short + b"t\x81.",
        "NEWOBJ_EX": b"\x80\x04" + name + b"\x93(" + short + b"t}\x92.",
        "EXT1": b"\x80\x02\x82\xf0(" + short + b"tR.",
        "EXT2": b"\x80\x02\x83\xf0\x00(" + short + b"tR.",
        "PERSID": b"Pos system\n.",
        "BINPERSID": b"(cos\nsystem\n" + short + b"tQ.",
        "BUILD": b"cos\nsystem\n(" + short + b"tR}b.",
        "memo": b"\x80\x04" + name + b"\x93\x940h\x00(" + short + b"tR.",
        "framed": b"\x80\x04\x95" + struct.pack("<Q", len(name) + len(short) + 5) + name + b"\x93(" + short + b"tR.",
        "after a STOP": b"N." + b"cos\nsystem\n(" + short + b"tR.",
        "allowed class, then a call": b"ctorch\nSize\n0cos\nsystem\n(" + short + b"tR.",
        "dotted name below an allowed module": b"\x80\x04"
        + _short(b"pickle")
        + _short(b"os.system")
        + b"\x93("
        + short
        + b"tR.",
        "attribute of an allowed module": b"\x80\x04" + _short(_META) + _short(b"dataclass") + b"\x93.",
        "getattr of an allowed class": (
            b"\x80\x04cbuiltins\ngetattr\n("
            + _short(_META)
            + _short(b"Metadata")
            + b"\x93"
            + _short(b"__init__")
            + b"tR."
        ),
    }


def plain(canary: Path) -> Iterator[Payload]:
    """Every bare pickle, objects in several protocols."""
    for name, value in calls(canary).items():
        if name == "getattr":
            continue  # modules cannot be pickled; the hand-made ones have it
        for protocol in (0, 2, 4, 5):
            data = _pickled(value, protocol)
            if data is not None:
                yield Payload(f"{name}, protocol {protocol}", data)
    for name, data in opcodes(canary).items():
        yield Payload(name, data)


def _pickled(value: Any, protocol: int) -> bytes | None:
    try:
        data = pickle.dumps(value, protocol=protocol)
    except (TypeError, pickle.PicklingError):
        return None
    assert list(pickletools.genops(data))
    return data


def wrapped(canary: Path) -> Iterator[Payload]:
    """Files that `torch.save` makes, new and old, around something that calls."""
    for name, value in calls(canary).items():
        for old in (False, True):
            stream = io.BytesIO()
            try:
                torch.save({"weight": torch.ones(3), "x": value}, stream, _use_new_zipfile_serialization=not old)
            except (TypeError, pickle.PicklingError):
                continue
            yield Payload(f"torch.save of {name}{', legacy' if old else ''}", stream.getvalue())


def inside_metadata(healthy: bytes, canary: Path) -> Iterator[Payload]:
    """A real `.metadata` that has a call somewhere inside."""
    evil = Calls(os.system, shell(canary))
    for field in ("planner_data", "storage_meta", "version"):
        metadata: Metadata = pickle.loads(healthy)
        setattr(metadata, field, evil)
        yield Payload(f".metadata with a call as its {field}", pickle.dumps(metadata))
    for table in ("state_dict_metadata", "storage_data"):
        metadata = pickle.loads(healthy)
        values = getattr(metadata, table)
        values[next(iter(values))] = evil
        yield Payload(f".metadata with a call in its {table}", pickle.dumps(metadata))
    metadata = pickle.loads(healthy)
    next(iter(metadata.storage_data.values())).relative_path = evil
    yield Payload(".metadata with a call as a path", pickle.dumps(metadata))
