"""The adapter: everything that knows SGLang. Nothing outside this package and ``models`` imports ``sglang.srt``."""
