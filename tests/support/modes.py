"""What operations of torch are seen: their names, those for which the host waits, and the memory of their results."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class NothingIsRead(TorchDispatchMode):
    """Fails where the host would wait for a value, or a shape would follow from one."""

    WAIT = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__.split(".")[0] not in self.WAIT, func
        return func(*args, **kwargs or {})


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that was made: memory, not a view that repeats it."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result
