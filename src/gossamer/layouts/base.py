"""The parts that layouts share: walks of numpy arrays or torch tensors, their copies on devices, their transpose.

Nothing here imports a framework before it is asked for tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NoReturn, Self, TypeVar

import numpy as np

from gossamer.checks import show

OF_EACH = "of each sequence"
Array = Any  # numpy.ndarray or torch.Tensor


class WalkArrays:
    """One direction of a layout: rows in groups of `block_rows`, and arrays that say which columns each visits."""

    rows: int
    columns: int
    block_rows: int

    @property
    @abstractmethod
    def lead(self) -> tuple[int, int]:
        """(Bl, Hl): 1 where batch elements or heads share the lists."""

    @abstractmethod
    def arrays(self) -> list[Array]:
        """Every array in a fixed order (see `with_arrays`); int32, but for the words of bits, which come last."""

    @abstractmethod
    def with_arrays(self, arrays: list[Array]) -> Self:
        """The same walk over other arrays, in the order of `arrays()`."""

    @property
    def tiles(self) -> int:
        """T, the number of groups of rows."""
        return -(-self.rows // self.block_rows)

    @property
    def device(self) -> Any:
        """The torch device of the arrays, or None for numpy."""
        *_, last = self.arrays()
        return None if isinstance(last, np.ndarray) else last.device

    def on_host(self) -> Self:
        """The same walk as numpy arrays; itself when it is one. Tensors on a GPU are copied, which waits for it.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        if self.device is None:
            return self
        if self.device.type == "cuda":
            import torch

            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a CUDA graph cannot capture this call: lists that are on the GPU alone are read on the host by "
                    "what computes it; kernels, which do not, take float16, bfloat16 and float32"
                )
        *arrays, packed = [a.cpu().numpy() for a in self.arrays()]
        return self.with_arrays([*arrays, packed.view(np.uint32)])

    def on_device(self, device: Any) -> Self:
        """The same walk as torch tensors on `device`."""
        import torch

        def move(array: Array) -> Any:
            if isinstance(array, np.ndarray):
                array = torch.from_numpy(np.ascontiguousarray(array).view(np.int32))
            return array.to(device)

        return self.with_arrays([move(a) for a in self.arrays()])


W = TypeVar("W", bound=WalkArrays)


@dataclass(frozen=True, eq=False)
class Layout(Generic[W]):
    """The pairs of a (Q, K) score matrix to compute. `columns` is the transpose of `rows`, built on first use.

    `q_offset` is the position of row 0 by which pairs were told: an int, a 0-d tensor, "of each sequence" where they
    have positions of their own, or None where nothing says it. Only `alibi_slopes` read it.
    """

    rows: W
    host: Self | None = field(default=None, repr=False)  # over the numpy arrays that this is a device copy of
    _transpose: list[W] = field(default_factory=list, repr=False)
    _copies: dict[Any, Self] = field(default_factory=dict, repr=False)
    q_offset: Any = field(default=None, repr=False)
    __array_ufunc__ = None  # numpy leaves `&` to the methods below

    @abstractmethod
    def _transposed(self, walk: W) -> W:
        """The transpose of a walk of numpy arrays."""

    def at_offset(self, q_offset: Any) -> Self:
        """The same layout with another position of row 0."""
        return replace(self, _copies={}, q_offset=q_offset)

    def __and__(self, other: Any) -> NoReturn:
        raise ValueError(
            f"a {type(self).__name__} is not joined with others: join patterns by & | ~ and make the layout of the "
            f"result; got {show(other)}"
        )

    __rand__ = __or__ = __ror__ = __and__

    def __invert__(self) -> NoReturn:
        raise ValueError(f"a {type(self).__name__} has no complement: make the layout of ~pattern")

    @property
    def Q(self) -> int:
        return self.rows.rows

    @property
    def K(self) -> int:
        return self.rows.columns

    @property
    def block_q(self) -> int:
        return self.rows.block_rows

    @property
    def lead(self) -> tuple[int, int]:
        """(Bl, Hl): 1 where batch elements or heads share the layout."""
        return self.rows.lead

    @property
    def columns(self) -> W:
        """The transpose: keys and the queries that keep them, for dK and dV. Tensors go through the CPU (one copy)."""
        if not self._transpose:
            if self.host is not None:
                transposed = self.host.columns.on_device(self.device)
            else:
                transposed = self._transposed(self.rows.on_host())
                if self.device is not None:
                    transposed = transposed.on_device(self.device)
            self._transpose.append(transposed)
        return self._transpose[0]

    @property
    def device(self) -> Any:
        """The torch device of the arrays, or None for numpy."""
        return self.rows.device

    def to(self, device: Any) -> Self:
        """A copy with torch tensors on `device`; made once and kept."""
        import torch

        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        held = self.rows.device
        if held == device:
            return self
        copy = self._copies.get(device)
        if copy is None:
            host = self.host
            if held is None:  # a twin without copies: they would hold one another until the collector of cycles
                host = type(self)(self.rows, None, self._transpose, q_offset=self.q_offset)
            moved = type(self)(self.rows.on_device(device), host, q_offset=self.q_offset)
            copy = self._copies.setdefault(device, moved)
        return copy
