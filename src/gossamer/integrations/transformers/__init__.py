"""gossamer as an attention implementation of the `transformers` library."""

from gossamer.integrations.transformers.registration import register
from gossamer.integrations.transformers.report import Layer, Report, explain

__all__ = ["Layer", "Report", "explain", "register"]
