"""lm-eval's task class of ours: shared text in the position that the YAML file names. Needs ``lm_eval``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from sglang_acache.evals.prompts import Doc, Prompt, format_named, place


class PositionedTask(ConfigurableTask):  # type: ignore[misc]
    """A ``generate_until`` task whose examples may stand before, inside or after a document's own text.

    ``metadata`` of the YAML file: ``format`` (a name of ``prompts.FORMATS``), ``position``, ``shots_from`` (index of
    the first example in the few-shot split, default 0) and ``decoding`` (``custom_params`` of every request; those
    given with ``--gen_kwargs`` win).
    """

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        fields = {key: value for key, value in (config or {}).items() if key != "class"}
        self._form = format_named(fields["metadata"]["format"])
        super().__init__(config=fields)

    def render(self, doc: Doc, shots: int | None = None) -> Prompt:
        return place(self._form, self.config.metadata["position"], doc, self._examples(shots))

    def shared_text(self, doc: Doc) -> str:
        """What a document's prompt shares with others, as it stands in the prompt."""
        return self._form.shared_text(doc, self._examples(None))

    def doc_to_text(self, doc: Doc, doc_to_text: Any = None) -> str:
        return self.render(doc).left

    def doc_to_target(self, doc: Doc, doc_to_target: Any = None) -> str:
        return self._form.target(doc)

    def fewshot_context(
        self,
        doc: Doc,
        num_fewshot: int,
        system_instruction: str | None = None,
        apply_chat_template: bool = False,
        fewshot_as_multiturn: bool = False,
        chat_template: Callable[..., Any] | None = None,
        gen_prefix: str | None = None,
    ) -> Any:
        """The text before the hole; as one user turn where lm-eval applies a chat template."""
        text = self.render(doc, num_fewshot).left
        if not apply_chat_template or chat_template is None:
            return text if system_instruction is None else f"{system_instruction}{self._form.gap}{text}"
        system = [{"role": "system", "content": system_instruction}] if system_instruction else []
        return chat_template([*system, {"role": "user", "content": text}], add_generation_prompt=True)

    def construct_requests(self, doc: Doc, ctx: Any, **kwargs: Any) -> Instance:
        """lm-eval's request, with the text after the hole and the decoding parameters in ``custom_params``."""
        instance = super().construct_requests(doc, ctx, **kwargs)
        text, sampling = instance.arguments
        instance.arguments = (text, with_custom_params(sampling, self.config.metadata, self.render(doc).right))
        return instance

    def _examples(self, shots: int | None) -> list[Doc]:
        count = self.config.num_fewshot if shots is None else shots
        if not count or self._form.shared is not None:
            return []
        docs, first = self.fewshot_docs(), self.config.metadata.get("shots_from", 0)
        return [docs[index] for index in range(first, first + count)]


def with_custom_params(sampling: dict[str, Any], metadata: dict[str, Any], right: str) -> dict[str, Any]:
    """lm-eval's generation arguments with ``custom_params`` completed.

    lm-eval sends one request's arguments for all that it takes to be alike, and of a nested object it compares the
    keys only. ``user``, which OpenAI's schema leaves to the client, tells requests with other values apart.
    """
    custom = {**metadata.get("decoding", {}), **(sampling.get("custom_params") or {})}
    if right:
        custom["suffix"] = right
    digest = hashlib.sha256(json.dumps(custom, sort_keys=True).encode()).hexdigest()[:16]
    return {**sampling, "custom_params": custom, "user": digest}
