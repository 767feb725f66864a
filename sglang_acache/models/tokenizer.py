"""The tokenizer class that Dream checkpoints name, without their remote code."""

from transformers import Qwen2Tokenizer


class DreamTokenizer(Qwen2Tokenizer):
    """Qwen2's byte-level BPE, with the special tokens that the checkpoint's own files list."""
