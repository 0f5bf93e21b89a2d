"""The terms of a pair in the sums of its query: instructions on registers, for one query and a lane's candidate.

A term is made of the numbers of its law. `add` gets the query's place k, the parts of x_candidate - x_query, s = r^2,
whether the pair is within the radius, and what the two bring; sums are in `total`, one for each output and query.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32
from cutlass._mlir.dialects import llvm

from gossamer.particles.kernels.radial.configurations import LEAST, RadialConfig
from gossamer.particles.kernels.radial.functions import result
from gossamer.particles.kernels.radial.gravity import long_root


@cute.jit
def select(condition: Any, x: Any, y: Any) -> Any:
    """x where the condition holds, else y."""
    return x if condition else y


def power(x: Any) -> Any:
    """2^x; what is under the least normal number is 0."""
    return assembly("ex2.approx.ftz.f32 $0, $1;", x)


def inverse_root(x: Any) -> Any:
    return assembly("rsqrt.approx.ftz.f32 $0, $1;", x)


def add_where(condition: Any, total: Any, x: Any, y: Any) -> Any:
    """total + x y where the condition holds, in one instruction."""
    code = "{ .reg .f32 t; mov.f32 t, $1; @$4 fma.rn.f32 t, $2, $3, t; mov.f32 $0, t; }"
    return assembly(code, total, x, y, condition)


def assembly(code: str, *operands: Any) -> Any:
    """A line of PTX without effects, of float32 numbers and conditions; its result is $0."""
    letters = ["b" if isinstance(x, Boolean) else "f" for x in operands]
    value = llvm.inline_asm(
        Float32.mlir_type, [x.ir_value() for x in operands], code, ",".join(["=f", *letters]), has_side_effects=False,
        is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip
    return Float32(value)


class Base:
    """The operations by which functions that users write are computed."""

    where = staticmethod(select)

    @staticmethod
    def exp(x: Any) -> Any:
        return power(x * 1.4426950408889634)

    @staticmethod
    def sqrt(x: Any) -> Any:
        return assembly("sqrt.approx.ftz.f32 $0, $1;", x)

    @staticmethod
    def log(x: Any) -> Any:
        return assembly("lg2.approx.ftz.f32 $0, $1;", x) * 0.6931471805599453

    @staticmethod
    def sin(x: Any) -> Any:
        return cute.math.sin(x)

    @staticmethod
    def cos(x: Any) -> Any:
        return cute.math.cos(x)

    @staticmethod
    def tanh(x: Any) -> Any:
        return cute.math.tanh(x)


class Term:
    """One kind of term."""

    def __init__(self, config: RadialConfig, numbers: Any) -> None:
        self.config, self.numbers, self.queries = config, numbers, config.queries
        self.start = 0.0  # what s begins with

    def add(self, total: Any, k: int, step: Any, s: Any, within: Any, mine: Any, theirs: Any) -> None:
        """Add one pair."""
        raise NotImplementedError

    def put(self, total: Any, output: int, k: int, within: Any, x: Any, y: Any) -> None:
        """Add x y to a sum if the pair counts."""
        at = output * self.queries + k
        total[at] = add_where(within, total[at], x, y)

    def own(self, s: Any, slope: bool) -> Any:
        """(value, derivative) of the function of a user, who has a unit of length of his own."""
        own, (*_, length) = self.config.own, self.numbers
        assert own is not None
        value = result(own.function, s * length * length, Base, self.numbers[: own.numbers], slope)
        return value._replace(slope=value.slope * length * length) if slope else value

    def scaled(self, value: Any, output: int) -> Any:
        """A finished sum."""
        return value


class Count(Term):
    def add(self, total, k, step, s, within, mine, theirs):
        self.put(total, 0, k, within, Float32(1.0), Float32(1.0))


class Sum(Term):
    """exp2(n_0 s) b, or f(s) b."""

    def add(self, total, k, step, s, within, mine, theirs):
        w = power(s * self.numbers[0]) if self.config.own is None else self.own(s, False).value
        for c in range(self.config.channels):
            self.put(total, c, k, within, w, theirs[c])


class SumSlopes(Sum):
    """n_1 exp2(n_0 s) (a . b) step, then exp2(n_0 s) b: the gradients to positions, and those to values.

    Candidates bring their values, then gradients; queries the other way round. Of a function of a user:
    -2 f'(s) (a . b) step, for two places, since f' may be infinite at 0, and f(s) b.
    """

    def add(self, total, k, step, s, within, mine, theirs):
        n, apart = self.config.channels, within
        if self.config.own is None:
            w = value = power(s * self.numbers[0])
        else:
            value, slope = self.own(s, True)
            w, apart = -2.0 * slope, within & (s >= LEAST)
        for c in range(n if self.config.values else 0):
            self.put(total, 3 + c, k, within, value, theirs[n + c])
        inner = mine[n] * theirs[0] + mine[0] * theirs[n]
        for c in range(1, n):
            inner = inner + mine[n + c] * theirs[c] + mine[c] * theirs[n + c]
        w = w * inner
        for axis, part in enumerate(step):
            self.put(total, axis, k, apart, w, part)

    def scaled(self, value, output):
        return value * self.numbers[1] if self.config.own is None and output < 3 else value


class Force(Term):
    """w(s) m step: n_0 is the squared softening, n_1 to n_6 are the long-range part's.

    By parts that are in range where the sum is: see `gossamer.particles.laws.Pull`. Or w is a function of a user.
    """

    def __init__(self, config: RadialConfig, numbers: Any) -> None:
        super().__init__(config, numbers)
        if config.softened:
            self.start = numbers[0]

    def law(self, s):
        """(R w, 1 / R, R)"""
        inverse, root = inverse_root(s), long_root(s, self.numbers[1:7])  # s has the softening in it
        R = s * inverse
        return inverse * inverse - root * root * R, inverse, R

    def add(self, total, k, step, s, within, mine, theirs):
        apart = within if self.config.softened else within & (s >= LEAST)
        if self.config.own is None:
            w, inverse, _ = self.law(s)
            step = [part * inverse for part in step]
        else:
            w = self.own(s, False).value
        w = w * theirs[0]
        for axis, part in enumerate(step):
            self.put(total, axis, k, apart, w, part)


class ForceSlopes(Force):
    """The gradients of a force to positions and masses: see `gossamer.particles.terms.force_slopes`.

    Both bring the mass, then the gradient of the force. Pairs at one place are left out: products of a particle with
    itself cancel only in exact arithmetic. exp2(n_7 s + n_8) is the Gaussian of w': `ShortRangeGravity.pull`.
    """

    def __init__(self, config: RadialConfig, numbers: Any) -> None:
        super().__init__(config, numbers)
        self.start = 0.0  # s tells whether two particles are at one place

    def add(self, total, k, step, s, within, mine, theirs):
        apart = within & (s >= LEAST)
        mass, *push = theirs
        my_mass = mine[0]
        if self.config.own is None:
            s = s + self.numbers[0] if self.config.softened else s
            w, inverse, R = self.law(s)
            slope = -power(s * self.numbers[7] + self.numbers[8]) * R
            step, my_mass, mass = [part * inverse for part in step], my_mass * inverse, mass * inverse
        else:
            value = self.own(s, True)
            w, slope = value.value, 2.0 * value.slope
        turned = [my_mass * push[axis] - mass * mine[1 + axis] for axis in range(3)]
        inner = step[0] * turned[0] + step[1] * turned[1] + step[2] * turned[2]
        if self.config.own is None:  # a difference of numbers, not of products with w, which may be infinite
            turned = [u - 3.0 * inner * part for u, part in zip(turned, step, strict=True)]
        along = slope * inner
        for axis in range(3):
            self.put(total, axis, k, apart, w, turned[axis])
            self.put(total, axis, k, apart, along, step[axis])
        if self.config.values:
            dot = step[0] * push[0] + step[1] * push[1] + step[2] * push[2]
            self.put(total, 3, k, apart, -w, dot)


TERMS = {"count": Count, "sum": Sum, "sum_slopes": SumSlopes, "force": Force, "force_slopes": ForceSlopes}
