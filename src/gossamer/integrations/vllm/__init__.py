"""gossamer as an attention backend of vLLM, the engine that serves models; importing this needs torch alone."""

from gossamer.integrations.vllm.attending import KeptMass, kept_mass
from gossamer.integrations.vllm.registration import register

__all__ = ["KeptMass", "kept_mass", "register"]
