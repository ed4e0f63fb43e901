"""llama.cpp's infill API: a hole in a text, for which there is no counter, only a certain bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvgate.core.ask import Prompt
from kvgate.ports import ReadRequest
from kvgate.wire import fields
from kvgate.wire.families import LlamaCppText

if TYPE_CHECKING:
    from kvgate.core.json_object import JsonObject

FRAME_TOKENS: Final = 16
"""More than llama.cpp adds around the parts: BOS, prefix, suffix, middle, repository and separator tokens."""

FILE_FRAME_TOKENS: Final = 24
"""More than it adds around one extra file, also where the model has no token for it and it writes a text line."""


class LlamaCppInfill(LlamaCppText):
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
        prompt = Prompt((*pieces, *files), FRAME_TOKENS + FILE_FRAME_TOKENS * len(files))
        ask = fields.generating_ask(
            document,
            limits=self.output_fields,
            prompts=(prompt,),
            prompt_field="input_prefix",
            limit_field=self.canonical_field,
        )
        return ReadRequest(ask, document, usage_shown=True)


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
