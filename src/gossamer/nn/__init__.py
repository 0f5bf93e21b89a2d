"""Modules of torch around the operators of gossamer; `gossamer.nn` needs torch."""

from gossamer.nn.splash import SplashAttention

__all__ = ["SplashAttention"]
