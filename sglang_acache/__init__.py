"""Affix reuse for diffusion language models, as a plugin for SGLang."""

__version__ = "0.1.0"
