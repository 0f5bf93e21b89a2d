"""What is in the cubins of a compiled kernel's object file: resources that a thread takes, and machine code."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

EM_CUDA = 190
FRAME_SIZE, REGISTERS = 0x11, 0x2F  # attributes of .nv.info
NOBITS = 8  # the type of a section without contents, as shared memory has


class Section(NamedTuple):
    """A section of a cubin."""

    name: str
    kind: int
    size: int
    contents: bytes


def cubins(data: bytes) -> Iterator[list[Section]]:
    """The sections of each cubin that an object file holds."""
    at = data.find(b"\x7fELF", 1)
    while at > 0:
        if struct.unpack_from("<H", data, at + 18)[0] == EM_CUDA:
            yield _sections(data[at:])
        at = data.find(b"\x7fELF", at + 4)


def _sections(cubin: bytes) -> list[Section]:
    (table,) = struct.unpack_from("<Q", cubin, 40)
    width, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * width) for i in range(count)]
    begin = headers[names][4]

    def name(offset: int) -> str:
        return cubin[begin + offset : cubin.index(b"\0", begin + offset)].decode()

    return [
        Section(name(at_name), kind, size, b"" if kind == NOBITS else cubin[at : at + size])
        for at_name, kind, _, _, at, size in headers
    ]


def resources(data: bytes) -> tuple[list[int], list[int]]:
    """Registers a thread, and bytes of stack a thread (spills among them), of every kernel of an object file."""
    registers: list[int] = []
    stack: list[int] = []
    for sections in cubins(data):
        for section in sections:
            if section.name.startswith(".nv.info"):
                for attribute, value in _attributes(section.contents):
                    if attribute in (FRAME_SIZE, REGISTERS):
                        (registers if attribute == REGISTERS else stack).append(value)
    return registers, stack


def _attributes(info: bytes) -> Iterator[tuple[int, int]]:
    """(attribute, value) of what an .nv.info section says of functions."""
    at = 0
    while at < len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == 4:  # `value` bytes follow: the function, and what is said of it
            if attribute in (FRAME_SIZE, REGISTERS):
                yield attribute, struct.unpack_from("<II", info, at)[1]
            at += value


def machine_code(data: bytes) -> str:
    """A digest of what an object file runs on a GPU: instructions, constants, shared memory, registers and stack.

    The names of kernels, which follow from those of files and classes, are not in it.
    """
    kernels = []
    for sections in cubins(data):
        for kind, _, size, contents in sections:
            family = next((f for f in (".text.", ".nv.constant", ".nv.shared") if kind.startswith(f)), None)
            if family:
                kernels.append((family, size, hashlib.sha256(contents).hexdigest()))
    if not any(family == ".text." for family, *_ in kernels):
        raise ValueError(f"an object file must hold a cubin with code, got {len(data)} bytes without one")
    return hashlib.sha256(repr((sorted(kernels), resources(data))).encode()).hexdigest()
