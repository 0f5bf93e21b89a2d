"""Normalisers of alpha-entmax over rows of scores: any alpha in [1, 2], by one formula that holds at 1.

alpha-entmax (Peters et al., 2019, arXiv:1905.05702) is p_j = [(alpha - 1) s_j - tau]_+^(1 / (alpha - 1)). With
a = alpha - 1 and tau = a lam - 1 it is p_j = exp_a(s_j - lam), where exp_a(t) = [1 + a t]_+^(1 / a) becomes exp(t) as a
becomes 0, and lam the logsumexp: no digit is lost near alpha 1. A row's normaliser is the lam of which its p sum to 1.

It is found by Newton's method on the norm of the row: with F(lam) = sum exp_a(s - lam), F^a is the (1/a)-norm of
[1 + a (s - lam)]_+, which is convex and falls in lam, so that every step ends at or below the root. The step is exact
for softmax, for sparsemax once the support is right, and for equal scores at any alpha. A bracket is kept, and every
fourth step halves it, which bounds the number of steps of any row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# From this alpha - 1 on a power of a rounded number is right to a few units.
POWERS = 0.125
QUADRATIC = 1e-4  # a step of this size leaves some 1e-8
MOST_STEPS = 240  # every fourth one halves the bracket, at most log2(n) wide: 60 halvings reach float64


class Powers(NamedTuple):
    """p = exp_a(t), and u = p^(1 - a), which is -dp/dlam: p^(2 - alpha) on the support and 0 elsewhere."""

    p: Tensor
    u: Tensor


def powers(t: Tensor, a: Tensor, same: float | None = None) -> Powers:
    """p and u of t (m, c), scores less their normaliser, finite: the least number of its type is no key.

    Args:
        a: (m, 1), alpha - 1 of each row.
        same: that of all rows, where they have one.
    """
    if same == 0.0:
        p = torch.exp(t)
        return Powers(p, p)
    if same is not None and same >= POWERS:
        y = (t * same).add_(1).clamp_(min=0)
        if same == 0.5:  # without a power: the alphas in common use
            return Powers(y * y, y)
        p = y if same == 1.0 else torch.pow(y, 1 / same)
        return Powers(p, (p / y).masked_fill_(y <= 0, 0.0))
    y = (t * a).clamp_(min=-1)
    log = torch.log1p(y)
    zero = a == 0
    if bool(zero.any()):
        log = torch.where(zero, t, log.div_(a.masked_fill(zero, 1.0)))
    else:
        log.div_(a)
    p = log.exp_()
    y.add_(1)
    return Powers(p, (p / y).masked_fill_(y <= 0, 0.0))


class Normalised(NamedTuple):
    """Rows of probabilities."""

    p: Tensor  # (m, c), each row sums to 1; 0 in rows without a key
    normaliser: Tensor  # (m,) lam; inf in rows without a key


def normalised(s: Tensor, a: Tensor, start: Tensor | None = None, same: float | None = None) -> Normalised:
    """alpha-entmax of rows of scores.

    Args:
        s: (m, c) scores; -inf is no key. Rows with a NaN or inf give NaN.
        a: (m,), alpha - 1 of each row, in the dtype of s.
        start: (m,), where to begin: any number, best a little below lam.
        same: alpha - 1 of all rows, where they have one.
    """
    a = a[:, None]
    top = s.amax(1, keepdim=True)
    empty = top == -torch.inf
    t = differences(s, top)
    log = torch.log(torch.full_like(a, s.shape[1]))
    highest = over(-torch.expm1(-a * log), a, log)  # the most that lam can be over the largest of so many scores
    x = torch.zeros_like(top) if start is None else torch.minimum((start[:, None] - top).clamp_(min=0), highest)
    x = x.masked_fill_(empty, 0.0)
    low, high = torch.zeros_like(top), highest
    eps = torch.finfo(s.dtype).eps
    for step in range(MOST_STEPS):
        p, u = powers(t - x, a, same)
        F = p.sum(1, keepdim=True)
        low, high = torch.where(F >= 1, x, low), torch.where(F < 1, x, high)
        log = torch.log(F)
        move = torch.exp((1 - a) * log) * over(torch.expm1(a * log), a, log) / u.sum(1, keepdim=True)
        new = torch.minimum(torch.maximum(x + move, low), high)
        moved = torch.where(move.abs() < torch.inf, move.abs() / (1 + x), 0.0)  # of NaN there is nothing to find
        done = moved <= 512 * eps
        if step % 4 == 3:
            new = torch.where(done, new, (low + high) / 2)
        x = new
        if bool(done.all()):
            break
    if bool((moved > 16 * eps).any()):
        p = powers(t - x, a, same).p
    p = torch.where(empty, 0.0, p / p.sum(1, keepdim=True))
    return Normalised(p, torch.where(empty, torch.inf, top + x).squeeze(1))


def of_halves(s: Tensor, start: Tensor | None = None) -> Normalised:
    """alpha-entmax at 1.5 of rows of scores, all in the type of s: p = [s / 2 - tau]_+^2.

    Args:
        s: (m, c) scores, which are overwritten; -inf is no key. Rows with a NaN or inf give NaN.
        start: (m,), where to begin: any number, best a little below lam.
    """
    t = s.mul_(0.5)
    top = t.amax(1, keepdim=True)
    t.sub_(top.clamp(min=torch.finfo(s.dtype).min))  # tau is over top - 1, from where every step ends at or below it
    x = torch.full_like(top, -1.0)
    if start is not None:
        x = torch.maximum(x, (start[:, None] / 2 - 1 - top.double()).clamp_(max=-0.0).to(s.dtype))
    y = torch.empty_like(t)
    for _ in range(MOST_STEPS):
        norm = torch.linalg.vector_norm(torch.sub(t, x, out=y).clamp_(min=0), dim=1, keepdim=True)
        move = (norm - 1) * norm / y.sum(1, keepdim=True)
        move.nan_to_num_(0.0, 0.0, 0.0)  # of rows without a key, or with NaN
        x = (x + move).clamp_(-1, 0)
        if bool((move.abs() <= QUADRATIC).all()):
            break
    p = torch.sub(t, x, out=y).clamp_(min=0).square_()
    empty = top == -torch.inf
    p.div_(p.sum(1, keepdim=True).masked_fill_(empty, 1.0))
    return Normalised(p, torch.where(empty, torch.inf, 2 * (top.double() + x + 1)).squeeze(1))


def differences(s: Tensor, top: Tensor) -> Tensor:
    """Scores (m, c) less the largest of their row (m, 1), and a number far below for those that are -inf."""
    return (s - top.masked_fill(top == -torch.inf, 0.0)).clamp_(min=torch.finfo(s.dtype).min / 4)


def over(x: Tensor, a: Tensor, limit: Tensor) -> Tensor:
    """x / a, and `limit` where a is 0."""
    zero = a == 0
    return torch.where(zero, limit, x / torch.where(zero, 1.0, a))


def lower_bound(s: Tensor, a: Tensor, steps: int, same: float | None = None) -> Tensor:
    """(m,) a number under lam of rows that hold the scores s (m, c), by a few steps, with a margin for rounding.

    Any part of a row gives a lower bound: p over more keys sum to more.
    """
    a = a[:, None]
    top = s.amax(1, keepdim=True)
    t, x = differences(s, top), torch.zeros_like(top)
    for _ in range(steps):
        p, u = powers(t - x, a, same)
        log = torch.log(p.sum(1, keepdim=True))
        x = x + torch.exp((1 - a) * log) * over(torch.expm1(a * log), a, log) / u.sum(1, keepdim=True)
    margin = 16 * torch.finfo(s.dtype).eps * (1 + top.abs() + x)
    return (top + x - margin).squeeze(1)


def cut(normaliser: Tensor, a: Tensor) -> Tensor:
    """The score at and under which p is 0: lam - 1 / a, and -inf where a is 0."""
    zero = a == 0
    return torch.where(zero, -torch.inf, normaliser - 1 / torch.where(zero, 1.0, a))


def alpha_terms(p: Tensor, a: Tensor) -> Tensor:
    """w = dp/dalpha at a fixed lam: p log(p)^2 phi(a log p), 0 where p is 0; d alpha of a row is sum w (dP - delta).

    phi(z) = (1 - exp(-z) - z) / z^2, by its series near 0; at alpha 1 it is -1/2.

    Args:
        p: probabilities, of any shape.
        a: alpha - 1, which broadcasts to p.
    """
    log = torch.log(torch.where(p > 0, p, 1.0))
    z = -a * log  # from 0 up
    near = z < 0.5
    series = torch.full_like(p, 1 / 2)
    small = torch.where(near, z, 0.0)
    term = series.clone()
    for n in range(3, 15):
        term = term * small / n
        series = series + term
    far = torch.where(near, 1.0, z)
    phi = torch.where(near, series, (torch.expm1(far) - far) / (far * far))
    return -p * log * log * phi
