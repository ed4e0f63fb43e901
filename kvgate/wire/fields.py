"""The judged fields of a request, and what each of their values means."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from kvgate.core.ask import Ask, Prompt
from kvgate.core.json_object import Edit, MalformedJson, read_object
from kvgate.core.reason import Reason, refusal
from kvgate.ports import ReadRequest, Refused

if TYPE_CHECKING:
    from kvgate.core.json_object import JsonObject

PROMPTS_MAX: Final = 512
"""Prompts in one list: each is counted, and the engine has no limit of its own."""

SEQUENCE_FIELDS: Final = ("n_cmpl", "n")
"""Two names of one number for llama.cpp; both set and different is contradictory, and refused."""

OUTPUT_TOKENS_MAX: Final = 2**31 - 1
"""A limit above llama.cpp's own range, which it refuses, is this one, so that a tenant may be clamped."""

LLAMACPP_LIMITS: Final = ("n_predict", "max_completion_tokens", "max_tokens")
"""The names of the output limit for llama.cpp, the winner first, whatever the key order (measured)."""


def malformed(problem: str, param: str | None = None) -> Refused:
    """The refusal of a body that is not a request; `problem` never quotes it."""
    return Refused(refusal(Reason.MALFORMED, problem=problem, param=param))


def document_of(body: bytes) -> JsonObject:
    """The body as one JSON object.

    Raises:
        Refused: MALFORMED.
    """
    try:
        return read_object(body)
    except MalformedJson as error:
        raise malformed(str(error)) from None


def model_of(document: JsonObject) -> str | None:
    """The model that the request names, if it names one."""
    model = document.get("model")
    if model is not None and not isinstance(model, str):
        raise malformed("'model' must be a string", "model")
    return model


def boolean(document: JsonObject, field: str) -> bool:
    """A field that must be true or false; missing and null are false."""
    value = document.get(field)
    if value is not None and not isinstance(value, bool):
        raise malformed(f"'{field}' must be true or false", field)
    return bool(value)


def output_limit(document: JsonObject, fields: tuple[str, ...]) -> int | None:
    """The effective output limit, in tokens; None is no limit.

    Of the fields that set one, the first wins. What a value means, measured on llama.cpp: missing, null, -1: no
    limit; 0: one token; true and false: 1 and 0; 3.7: 3; below -1, or not a number: refused. One difference is
    deliberate: for llama.cpp `n_predict: -1` beats `max_tokens: 4` and the answer is unlimited (llama.cpp issue
    19831); here a name without a limit beats nothing.

    Every field that is there must be a number, also those that another one beats: what the client meant by two
    limits of which one is nonsense cannot be known.
    """
    limits = [_limit(field, document.get(field)) for field in fields if document.get(field) is not None]
    first = next((limit for limit in limits if limit != -1), None)
    return None if first is None else max(first, 1)


def _limit(field: str, value: Any) -> int:
    if not isinstance(value, int | float):
        raise malformed(f"'{field}' must be a number", field)
    if value < -1:
        raise malformed(f"'{field}' must be -1 or more", field)
    return min(math.trunc(value), OUTPUT_TOKENS_MAX)


def sequences_of(document: JsonObject) -> int:
    """The number of answers to each prompt."""
    given = {field: document.get(field) for field in SEQUENCE_FIELDS if document.get(field) is not None}
    for field, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value != int(value):
            raise malformed(f"'{field}' must be a whole number of at least 1", field)
    if len(set(given.values())) > 1:
        raise malformed("'n' and 'n_cmpl' say two different numbers", "n")
    return int(next(iter(given.values()), 1))


def usage_shown(document: JsonObject) -> bool:
    """Whether the client asks to see a stream's usage (`stream_options.include_usage`)."""
    options = document.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise malformed("'stream_options' must be an object", "stream_options")
    shown = options.get("include_usage")
    if shown is not None and not isinstance(shown, bool):
        raise malformed("'stream_options.include_usage' must be true or false", "stream_options")
    return bool(shown)


def messages_of(document: JsonObject) -> list[dict[str, Any]]:
    """The messages of a chat: a list, not empty, of objects with a role."""
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        raise malformed("'messages' must be a list with at least one message", "messages")
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise malformed(f"'messages[{at}]' must be an object", "messages")
        if not isinstance(message.get("role"), str):
            raise malformed(f"'messages[{at}].role' must be a string", "messages")
        if not isinstance(message.get("content"), str | list | None):
            raise malformed(f"'messages[{at}].content' must be a string or a list of parts", "messages")
    return messages


def prompts_of(field: str, value: Any) -> tuple[Prompt, ...]:
    """The prompts of a field that holds one or several, as llama.cpp takes them apart.

    A string, or a list of token ids, or of token ids and strings, is one prompt; any other list holds one prompt
    an element. Objects (multimodal data) have no size that could be known, and are refused.
    """
    if isinstance(value, str):
        return (Prompt((value,)),)
    if not isinstance(value, list) or not value:
        raise malformed(f"'{field}' must be a string, a list of tokens, or a list of those, and not empty", field)
    if any(_is_token(piece) for piece in value) and all(_is_piece(piece) for piece in value):
        return (Prompt(tuple(value)),)
    if len(value) > PROMPTS_MAX:
        raise malformed(f"'{field}' may hold at most {PROMPTS_MAX} prompts; please split the request", field)
    return tuple(_prompt(field, at, element) for at, element in enumerate(value))


def generating_ask(
    document: JsonObject,
    *,
    limits: tuple[str, ...],
    prompts: tuple[Prompt, ...] = (),
    prompt_field: str = "messages",
    limit_field: str = "max_tokens",
) -> Ask:
    """What a request wants that generates text, by the fields that every such API has."""
    return Ask(
        model=model_of(document),
        output_tokens=output_limit(document, limits),
        sequences=sequences_of(document),
        stream=boolean(document, "stream"),
        prompts=prompts,
        prompt_field=prompt_field,
        limit_field=limit_field,
    )


def silent_ask(document: JsonObject, prompts: tuple[Prompt, ...], prompt_field: str) -> Ask:
    """What a request wants that generates nothing."""
    return Ask(model_of(document), 0, 1, stream=False, prompts=prompts, prompt_field=prompt_field)


def embedding_request(document: JsonObject) -> ReadRequest:
    """An embedding request: prompts and no output. llama.cpp reads `content` where there is no `input`."""
    field = "input" if "input" in document or "content" not in document else "content"
    ask = silent_ask(document, prompts_of(field, document.get(field)), field)
    return ReadRequest(ask, document, usage_shown=True)


def embedding_edit(document: JsonObject) -> Edit:
    """Only the prompts that were judged are sent: a second name for them goes."""
    return Edit({}, frozenset({"content"} if "input" in document else ()))


def _prompt(field: str, at: int, element: Any) -> Prompt:
    if isinstance(element, str):
        return Prompt((element,))
    if isinstance(element, list) and element and all(_is_piece(piece) for piece in element):
        return Prompt(tuple(element))
    raise malformed(f"'{field}[{at}]' must be a string or a list of tokens", field)


def _is_token(piece: Any) -> bool:
    return isinstance(piece, int) and not isinstance(piece, bool) and piece >= 0


def _is_piece(piece: Any) -> bool:
    return isinstance(piece, str) or _is_token(piece)


def string(document: JsonObject, field: str) -> str:
    """A field that must be a string; missing and null are the empty one."""
    value = document.get(field)
    if not isinstance(value, str | None):
        raise malformed(f"'{field}' must be a string", field)
    return value or ""


def capped(document: JsonObject, field: str, output_tokens: int, sequences: int) -> dict[str, Any]:
    """The members that carry the judged limit and, where the client named one, the number of answers."""
    put: dict[str, Any] = {field: output_tokens}
    if any(name in document for name in SEQUENCE_FIELDS):
        put["n"] = sequences
    return put


FIGURES: Final = ("stop", "tokens_evaluated", "tokens_predicted", "timings")
"""What llama.cpp's own answers must hold, so that their end is seen and their cost is known."""


def figures_kept(document: JsonObject) -> dict[str, Any]:
    """`response_fields` leaves all else out of an answer, and with it what it cost; the figures are added to it.

    They come last: a path like `generation_settings/stop` is shown as `stop` too, and the last one wins. What is no
    list of strings, the engine ignores (measured).
    """
    given = document.get("response_fields")
    if not isinstance(given, list) or not given or not all(isinstance(path, str) for path in given):
        return {}
    own = list(FIGURES)
    return {} if given[-len(own) :] == own else {"response_fields": [*given, *own]}
