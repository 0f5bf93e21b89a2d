"""What every launch asks of a device, the memory of results, and key lengths as kernels read them."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

ROOM_BYTES = 2**24  # the largest workspace that waits for the next call
ROOMS = 4  # of them that wait, each for a stream
MOST_SHAPES = 64  # whose views of a workspace are kept
MOST_ENDS = 256  # numbers of keys whose bounds are kept


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 elsewhere (Triton's interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def elsewhere(x: Tensor) -> bool:
    """Whether a tensor is on a GPU that is not the current one, where its kernels would not be run."""
    return x.is_cuda and x.device.index != torch.cuda.current_device()


def template(like: Tensor, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype | None = None) -> Tensor:
    """A shape and a type, without the memory, for `empty_from`: no other allocation costs the host as little."""
    return like.new_empty((1,), dtype=dtype).expand(shape)


def empty_from(template: Tensor) -> Tensor:
    """An uninitialised contiguous tensor."""
    return torch.empty_like(template, memory_format=torch.contiguous_format)


def int32_lengths(lengths: Tensor, K: int) -> Tensor:
    """Key lengths (B,) of any integer type as int32, by one launch at most; those of int64 are clamped to [0, K].

    What int32 holds is clamped by the kernel that reads it.
    """
    if lengths.dtype != torch.int64:
        return lengths.to(torch.int32)
    none, every = _ends(lengths.device, K)
    return torch.clamp(lengths, none, every, out=lengths.new_empty(lengths.shape, dtype=torch.int32))


@lru_cache(MOST_ENDS)
def _ends(device: torch.device, K: int) -> tuple[Tensor, ...]:
    """0 and K on a device: a clamp by numbers of Python would not write another type than it reads."""
    with torch.inference_mode(False):
        return torch.tensor([0, K]).to(device).unbind()


class Room(NamedTuple):
    """A workspace: its stream, float32 memory, and views of it by the shapes of those that used it."""

    stream: tuple[int | None, int]
    memory: Tensor
    views: dict[tuple[tuple[int, ...], ...], tuple[Tensor, ...]]


_rooms: dict[tuple[int | None, int], Room] = {}


class Workspace:
    """Float32 tensors that the kernels of a call leave one another: `shapes`, uninitialised, at multiples of 256 bytes.

    Their memory waits for the next call on the stream, whose kernels come after. No call gets what another one has
    taken and not left; large ones, and those of a graph, which may be replayed on any stream, are allocated.
    """

    def __init__(self, like: Tensor, *shapes: tuple[int, ...]) -> None:
        self.device, self.shapes = like.device, shapes
        self.likes = [template(like, shape, torch.float32) for shape in shapes]
        self.starts, size = [], 0
        for shape in shapes:
            self.starts.append(size)
            size += -(-math.prod(shape) // 64) * 64
        self.size = size

    def take(self) -> tuple[Room | None, tuple[Tensor, ...]]:
        """(what `leave` wants, or None; the tensors)."""
        if 4 * self.size > ROOM_BYTES or torch.cuda.is_current_stream_capturing():
            return None, tuple(empty_from(x) for x in self.likes)
        stream = self.device.index, torch._C._cuda_getCurrentRawStream(self.device.index)
        room = _rooms.pop(stream, None)
        if room is None or room.memory.numel() < self.size:
            size = 1 << (self.size - 1).bit_length()
            room = Room(stream, torch.empty(size, dtype=torch.float32, device=self.device), {})
        views = room.views.get(self.shapes)
        if views is None:
            if len(room.views) >= MOST_SHAPES:
                room.views.clear()
            views = room.views[self.shapes] = tuple(
                room.memory[start : start + math.prod(shape)].view(shape)
                for start, shape in zip(self.starts, self.shapes, strict=True)
            )
        return room, views

    @staticmethod
    def leave(room: Room) -> None:
        """The kernels that use the tensors have been launched."""
        if len(_rooms) < ROOMS or room.stream in _rooms:
            _rooms[room.stream] = room
