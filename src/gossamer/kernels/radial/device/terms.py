"""What a pair adds to the sums of its query: instructions on registers, for one query and a lane's candidate.

A term is made of the numbers of its law. `add` gets the query's place k, the parts of x_candidate - x_query, s = r^2,
whether the pair is within the radius, and what the two bring; sums are in `total`, one for each output and query.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, const_expr

from gossamer.kernels.radial.configurations import RadialConfig


@cute.jit
def select(condition: Any, x: Any, y: Any) -> Any:
    """x where the condition holds, else y."""
    return x if condition else y


class Term:
    """One kind of term."""

    def __init__(self, config: RadialConfig, numbers: Any) -> None:
        self.config, self.numbers, self.queries = config, numbers, config.queries

    def add(self, total: Any, k: int, step: Any, s: Any, within: Any, mine: Any, theirs: Any) -> None:
        """Of one pair."""
        raise NotImplementedError

    def put(self, total: Any, output: int, k: int, value: Any) -> None:
        at = output * self.queries + k
        total[at] = total[at] + value

    def scaled(self, value: Any, output: int) -> Any:
        """A finished sum."""
        return value


class Count(Term):
    def add(self, total, k, step, s, within, mine, theirs):
        self.put(total, 0, k, select(within, Float32(1.0), Float32(0.0)))


class Sum(Term):
    """exp2(n_0 s) b."""

    def weight(self, s, within):
        w = cute.math.exp2(s * self.numbers[0], fastmath=True)
        return select(within, w, Float32(0.0))

    def add(self, total, k, step, s, within, mine, theirs):
        w = self.weight(s, within)
        for c in range(self.config.channels):
            self.put(total, c, k, w * theirs[c])


class SumSlopes(Sum):
    """n_1 exp2(n_0 s) (a . b) step: candidates bring their values, then gradients; queries the other way round."""

    def add(self, total, k, step, s, within, mine, theirs):
        w, n = self.weight(s, within), self.config.channels
        inner = mine[n] * theirs[0] + mine[0] * theirs[n]
        for c in range(1, n):
            inner = inner + mine[n + c] * theirs[c] + mine[c] * theirs[n + c]
        w = w * inner
        for axis, part in enumerate(step):
            self.put(total, axis, k, w * part)

    def scaled(self, value, output):
        return value * self.numbers[1]


class Force(Term):
    """w(s) m step: n_0 is the squared softening, n_1 to n_9 are the polynomial's coefficients, n_10 is the unit."""

    def powers(self, s, within):
        """R^2, 1 / R, and whether the pair counts."""
        square = s + self.numbers[0] if const_expr(self.config.softened) else s
        apart = within if const_expr(self.config.softened) else within & (s > 0.0)
        return square, cute.math.rsqrt(square, fastmath=True), apart

    def polynomial(self, square):
        first, *rest = reversed(self.numbers[1:-1])
        p = first
        for c in rest:
            p = p * square + c
        return p

    def add(self, total, k, step, s, within, mine, theirs):
        square, inverse, apart = self.powers(s, within)
        w = inverse * inverse * inverse - self.polynomial(square)
        w = w * theirs[0]
        w = select(apart, w, Float32(0.0))
        for axis, part in enumerate(step):
            self.put(total, axis, k, w * part)

    def scaled(self, value, output):
        *_, unit = self.numbers  # of length: a force has length to the power of -2
        return value * unit * unit


class ForceSlopes(Force):
    """The gradients of a force to positions and masses: see `gossamer.particles.terms.force_slopes`.

    Both bring the mass, then the gradient of the force.
    """

    def add(self, total, k, step, s, within, mine, theirs):
        square, inverse, apart = self.powers(s, within)
        last, *rest = reversed(self.numbers[1:-1])
        p, slope = last, Float32(0.0)
        for c in rest:
            slope = slope * square + p
            p = p * square + c
        twice = inverse * inverse
        cube = twice * inverse
        w, slope = cube - p, -3.0 * cube * twice - 2.0 * slope
        w = select(apart, w, Float32(0.0))
        slope = select(apart, slope, Float32(0.0))
        turned = [mine[0] * theirs[1 + axis] - theirs[0] * mine[1 + axis] for axis in range(3)]
        along = slope * (step[0] * turned[0] + step[1] * turned[1] + step[2] * turned[2])
        for axis in range(3):
            self.put(total, axis, k, w * turned[axis] + along * step[axis])
        dot = step[0] * theirs[1] + step[1] * theirs[2] + step[2] * theirs[3]
        self.put(total, 3, k, -(w * dot))

    def scaled(self, value, output):
        *_, unit = self.numbers
        value = value * unit * unit
        return value * unit if output < 3 else value


TERMS = {"count": Count, "sum": Sum, "sum_slopes": SumSlopes, "force": Force, "force_slopes": ForceSlopes}
