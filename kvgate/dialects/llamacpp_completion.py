"""llama.cpp's own completion API."""

from __future__ import annotations

from kvgate.ports import ReadRequest, Texts
from kvgate.wire import fields, trim_asks
from kvgate.wire.families import LlamaCppText


class LlamaCppCompletion(LlamaCppText):
    """The dialect of `/completion`; implements `ports.Dialect`."""

    name = "llamacpp_completion"
    paths = ("/completion", "/completions")
    controls: tuple[str, ...] = ("/tokenize", "/detokenize", "/apply-template")

    def read(self, body: bytes) -> ReadRequest:
        """Judge a completion request.

        Raises:
            Refused: MALFORMED, with the field to blame.
        """
        document = fields.document_of(body)
        ask = fields.generating_ask(
            document,
            limits=self.output_fields,
            prompts=fields.prompts_of("prompt", document.get("prompt")),
            prompt_field="prompt",
            limit_field=self.canonical_field,
        )
        return ReadRequest(ask, document, usage_shown=True, trim=trim_asks.of_text(document))

    def trimmable(self, request: ReadRequest) -> Texts:
        """The prompt."""
        return Texts("prompt")
