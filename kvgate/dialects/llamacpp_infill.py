"""llama.cpp's infill API: a hole in a text, for which there is no counter, only a certain bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvgate.core.ask import Ask, Prompt
from kvgate.core.json_object import Edit
from kvgate.ports import ReadRequest
from kvgate.wire import answers, envelopes, fields

if TYPE_CHECKING:
    from kvgate.core.ask import Size
    from kvgate.core.json_object import JsonObject
    from kvgate.core.reason import Refusal
    from kvgate.ports import Told

OUTPUT_FIELDS: Final = fields.LLAMACPP_LIMITS
CANONICAL_FIELD: Final = "n_predict"

FRAME_TOKENS: Final = 16
"""More than llama.cpp adds around the parts: BOS, prefix, suffix, middle, repository and separator tokens."""

FILE_FRAME_TOKENS: Final = 24
"""More than it adds around one extra file, also where the model has no token for it and it writes a text line."""


class LlamaCppInfill:
    """The dialect of `/infill`; implements `ports.Dialect`."""

    name = "llamacpp_infill"
    paths = ("/infill",)
    controls: tuple[str, ...] = ()

    def read(self, body: bytes) -> ReadRequest:
        """Judge an infill request.

        Raises:
            Refused: MALFORMED, with the field to blame.
        """
        document = fields.document_of(body)
        pieces = [fields.string(document, field) for field in ("input_prefix", "input_suffix", "prompt")]
        files = _files(document)
        ask = Ask(
            model=fields.model_of(document),
            output_tokens=fields.output_limit(document, OUTPUT_FIELDS),
            sequences=fields.sequences_of(document),
            stream=fields.boolean(document, "stream"),
            prompts=(Prompt((*pieces, *files), FRAME_TOKENS + FILE_FRAME_TOKENS * len(files)),),
            prompt_field="input_prefix",
            limit_field="n_predict",
        )
        return ReadRequest(ask, document, usage_shown=True)

    def cap(self, request: ReadRequest, size: Size) -> Edit:
        """The output limit and the number of answers under one name each; no answer without its figures."""
        put = fields.capped(request.document, CANONICAL_FIELD, size.output_tokens, request.ask.sequences)
        put |= fields.figures_kept(request.document)
        return Edit(put, frozenset(OUTPUT_FIELDS + fields.SEQUENCE_FIELDS))

    def told(self, request: ReadRequest, body: bytes) -> Told | None:
        """The sum over the answers."""
        return answers.llamacpp_told(request, body)

    def tap(self, request: ReadRequest) -> answers.LlamaCppTap:
        """A watcher that waits for the last event of every answer."""
        return answers.LlamaCppTap(request)

    def refuse(self, refusal: Refusal) -> bytes:
        """llama.cpp's error envelope."""
        return envelopes.llamacpp_error(refusal)

    def refuse_in_stream(self, refusal: Refusal) -> bytes:
        """An error event, as llama.cpp itself sends one."""
        return envelopes.llamacpp_refusal_event(refusal)


def _files(document: JsonObject) -> list[str]:
    """The names and texts of the extra files."""
    extra = document.get("input_extra")
    if extra is None:
        return []
    if not isinstance(extra, list) or len(extra) > fields.PROMPTS_MAX:
        raise fields.malformed(f"'input_extra' must be a list of at most {fields.PROMPTS_MAX} files", "input_extra")
    texts = []
    for at, file in enumerate(extra):
        if not isinstance(file, dict) or not isinstance(file.get("text"), str):
            raise fields.malformed(f"'input_extra[{at}]' must be an object with a text", "input_extra")
        if not isinstance(file.get("filename"), str | None):
            raise fields.malformed(f"'input_extra[{at}].filename' must be a string", "input_extra")
        texts += [file.get("filename") or "", file["text"]]
    return texts
