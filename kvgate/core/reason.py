"""Why a request was not served as asked: one table for status, code, sentence, metric label and docs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    Args:
        label: the metric label and the value of `x-kvgate-reason`.
        status: HTTP status.
        code: the error code that clients act on.
        error_type: the error's type in OpenAI's form.
        sentence: a format string; its fields are given where the reason is raised.
        meaning: for the docs: when it happens and what to do.
    """

    label: str
    status: int
    code: str
    error_type: str
    sentence: str
    meaning: str


_OVERFLOW = ("context_length_exceeded", "invalid_request_error")
_INVALID = "invalid_request_error"
_DENIED = "authentication_error"
_BUSY = "rate_limit_error"
_DOWN = "service_unavailable_error"


class Reason(Enum):
    """Every refusal kvgate knows. The words "rate limit" and "quota" stay out of overflow sentences."""

    PROMPT_OVERFLOW = Row(
        "prompt_overflow",
        400,
        *_OVERFLOW,
        "This model's maximum context length is {limit_tokens} tokens{limited_by_clause}. However, {prompt_clause}"
        "{leaves_clause}. Please {advice}.",
        "The prompt leaves less room than `output_tokens_min`. Shorten the conversation, or raise the limit "
        "that the message names.",
    )
    GENERATION_OVERFLOW = Row(
        "generation_overflow",
        400,
        *_OVERFLOW,
        "This model's maximum context length is {limit_tokens} tokens{limited_by_clause}. However, you requested "
        "{requested_tokens} tokens ({prompt_tokens} in the prompt, {asked_tokens} for {sequences_clause}). "
        "At most {usable_generation} fit beside {beside}. Please ask for a shorter answer or {advice}.",
        'Prompt and output limit together do not fit. Ask for less, or set `on_overflow = "clamp"` for the tenant.',
    )
    UNTRIMMABLE = Row(
        "untrimmable",
        400,
        *_OVERFLOW,
        "This model's maximum context length is {limit_tokens} tokens{limited_by_clause}. However, your prompt has "
        "{prompt_tokens} tokens, and trimming cannot help: {protected_clause}{leaves_clause}. Please {advice}.",
        "The prompt overflows and may be trimmed, but what trimming never takes (system messages, the last user "
        "message and what follows it, pinned messages, tools) is too much by itself. The message says what to "
        "shorten.",
    )
    TOO_MANY_SEQUENCES = Row(
        "too_many_sequences",
        400,
        "too_many_sequences",
        _INVALID,
        "This request runs {sequences} sequences at once; at most {sequences_max} can run here. Please split it.",
        "`n` is above the engine's slots or the tenant's `concurrency_max`; a list of prompts counts as many as run "
        "at once, at most the slots, and its other prompts take their turns in them.",
    )
    MALFORMED = Row(
        "malformed",
        400,
        "invalid_request",
        _INVALID,
        "{problem}",
        "The body is not a request that kvgate and the engine would read the same way. The message says what "
        "is wrong.",
    )
    BAD_HTTP = Row(
        "bad_http",
        400,
        "bad_request",
        _INVALID,
        "{problem}",
        "The request is not valid HTTP, or its body broke off.",
    )
    HTTP_VERSION = Row(
        "http_version",
        505,
        "http_version_not_supported",
        _INVALID,
        "This server speaks HTTP/1.1 and HTTP/1.0.",
        "Another version on the request line.",
    )
    HEAD_TOO_LARGE = Row(
        "head_too_large",
        431,
        "head_too_large",
        _INVALID,
        "{problem}",
        "The request line or a header is over 8 KiB.",
    )
    MISSING_KEY = Row(
        "missing_key",
        401,
        "invalid_api_key",
        _DENIED,
        "You did not provide an API key. Send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
        "No key, and no `anonymous_tenant` is named.",
    )
    UNKNOWN_KEY = Row(
        "unknown_key",
        401,
        "invalid_api_key",
        _DENIED,
        "The API key is not known here, or two different keys were sent.",
        "The key's SHA-256 belongs to no tenant.",
    )
    PATH_FORBIDDEN = Row(
        "path_forbidden",
        403,
        "path_not_served",
        "permission_error",
        "kvgate does not serve this path to tenants. It serves the APIs of OpenAI, Anthropic and llama.cpp at the "
        "paths that its reference lists, spelled exactly so.",
        "The path is not on the allow-list, or is not spelled canonically (encoded characters, `//`, `..`).",
    )
    MODEL_FORBIDDEN = Row(
        "model_forbidden",
        403,
        "model_not_allowed",
        "permission_error",
        "This key may not use that model. It may use: {models}.",
        "The tenant's `models` does not list it.",
    )
    ENGINE_DEDICATED = Row(
        "engine_dedicated",
        403,
        "engine_dedicated",
        "permission_error",
        "This inference server is there for other tenants. Your operator can tell you the address of yours.",
        "`engine.dedicated_to` names the tenants that this engine serves, and the caller is none of them "
        "(docs/reuse.md).",
    )
    MODEL_NOT_FOUND = Row(
        "model_not_found",
        404,
        "model_not_found",
        _INVALID,
        "There is no such model here for this key; GET /v1/models lists those that there are.",
        "`GET /v1/models/ID` with an ID that the engine does not serve, or the tenant may not use.",
    )
    METHOD_NOT_ALLOWED = Row(
        "method_not_allowed",
        405,
        "method_not_allowed",
        _INVALID,
        "This path is served with {allowed} only.",
        "Wrong HTTP method for a served path.",
    )
    BODY_TOO_LARGE = Row(
        "body_too_large",
        413,
        "request_too_large",
        _INVALID,
        "The request body is over {body_bytes_max} bytes.",
        "Larger than `http.body_bytes_max`. Nothing of it was counted.",
    )
    BODY_ENCODING = Row(
        "body_encoding",
        415,
        "unsupported_encoding",
        _INVALID,
        "The request body could not be decoded. Send it uncompressed, or with gzip or deflate.",
        "Unknown or broken `Content-Encoding`.",
    )
    BODY_TIMEOUT = Row(
        "body_timeout",
        408,
        "request_timeout",
        _INVALID,
        "The request body did not arrive within {timeout_s:g} s.",
        "The client stopped sending. Nothing was reserved.",
    )
    QUEUE_FULL = Row(
        "queue_full",
        429,
        "queue_full",
        _BUSY,
        "{waiting} of your requests already wait, which is your queue's length. Try again in {retry_after_s} s.",
        "The tenant's `queue_max` is reached.",
    )
    SPOT_REFUSED = Row(
        "spot_refused",
        429,
        "spot_refused",
        _BUSY,
        "Others wait for this model, and your requests run only while nobody else does. Try again in "
        "{retry_after_s} s.",
        'The tenant\'s `tier` is "spot", and requests of other tiers wait (docs/fairness.md).',
    )
    QUEUE_TIMEOUT = Row(
        "queue_timeout",
        429,
        "queue_timeout",
        _BUSY,
        "No room came free for this request within {queue_timeout_s:g} s. Try again in {retry_after_s} s.",
        "Waited `queue_timeout_s` for slots, KV tokens or the tenant's own share.",
    )
    REQUESTS_PER_MINUTE = Row(
        "requests_per_minute",
        429,
        "rate_limit_exceeded",
        _BUSY,
        "You have sent as many requests as you may in a minute. Try again in {retry_after_s} s.",
        "The tenant's `requests_per_minute` is reached: those of the last 60 s that were let in or wait.",
    )
    TOKENS_PER_MINUTE = Row(
        "tokens_per_minute",
        429,
        "rate_limit_exceeded",
        _BUSY,
        "You have asked for as many tokens as you may in a minute. Try again in {retry_after_s} s.",
        "The tenant's `tokens_per_minute` is reached: prompts and output limits of the last 60 s, corrected by what "
        "the requests took.",
    )
    ENGINE_UNREACHABLE = Row(
        "engine_unreachable",
        503,
        "engine_unreachable",
        _DOWN,
        "The inference server cannot be reached. Try again in {retry_after_s} s.",
        "No connection to `engine.url`, or no answer on it. `/readyz` and the log name the cause.",
    )
    ENGINE_LOADING = Row(
        "engine_loading",
        503,
        "engine_loading",
        _DOWN,
        "The inference server is loading its model. Try again in {retry_after_s} s.",
        "The engine answers 503 until its model is loaded.",
    )
    ENGINE_UNDERSIZED = Row(
        "engine_undersized",
        503,
        "engine_undersized",
        _DOWN,
        "The inference server gives each request {n_ctx_slot} tokens of context; this service needs at least "
        "{context_tokens_min}. Its operator must restart it with more.",
        "n_ctx_slot is below `engine.context_tokens_min`. Raise `-c`, lower `-np`, or set "
        '`engine.on_undersized = "warn"`.',
    )
    ENGINE_UNKNOWN = Row(
        "engine_unknown",
        503,
        "engine_unknown",
        _DOWN,
        "The inference server does not tell what kvgate must know: {problem}.",
        "The engine is of no known kind, or a discovery endpoint is switched off.",
    )
    ENGINE_CHANGED = Row(
        "engine_changed",
        503,
        "engine_changed",
        _DOWN,
        "The inference server was replaced while this request waited. Try again in {retry_after_s} s.",
        "The engine changed more than once between the count and the start of one request.",
    )
    STORE_OUT = Row(
        "store_out",
        503,
        "store_out",
        _DOWN,
        "This gate cannot reach its ledger, and may not let more in without it. Try again in {retry_after_s} s.",
        "The store is out, and the request does not fit into what this gate held when the store last answered "
        '(`store.on_outage = "local"`), or nothing is let in without the store (`"reject"`).',
    )
    GATE_DRAINING = Row(
        "gate_draining",
        503,
        "gate_draining",
        _DOWN,
        "This gate is shutting down. Try again in {retry_after_s} s.",
        "SIGTERM was received; running requests finish, new ones go elsewhere.",
    )
    UNCOUNTED = Row(
        "uncounted",
        400,
        "uncountable_request",
        _INVALID,
        "The inference server could not count this request's tokens: {problem}",
        "The engine's own counter refused the body (a template error, broken tool arguments, an image without "
        "a projector). Nothing unsized is let through.",
    )
    ENGINE_REFUSED = Row(
        "engine_refused",
        400,
        "engine_refused",
        _INVALID,
        "The inference server refused this request: {problem}",
        "The engine's own check found a mistake in the body (a grammar, a sampler, a field's type).",
    )
    ENGINE_CANNOT = Row(
        "engine_cannot",
        501,
        "not_supported",
        "not_supported_error",
        "The inference server does not support this kind of request: {problem}",
        "Embeddings, rerank or infill on an engine that was not started for it, or whose model cannot.",
    )
    REUSE_SWITCH = Row(
        "reuse_switch",
        503,
        "reuse_not_switchable",
        _DOWN,
        "This API cannot be served safely here: its requests cannot switch prefix reuse off, and the inference "
        "server has it on. Its operator must start it with --no-cache-prompt --cache-ram 0 --no-cache-idle-slots.",
        "llama.cpp's `/v1/messages` drops `cache_prompt`. Start the engine with the flags that the sentence names; "
        "kvgate probes it at each new engine.",
    )
    REUSE_UNPROVEN = Row(
        "reuse_unproven",
        503,
        "reuse_unproven",
        _DOWN,
        "kvgate could not find out yet whether the inference server has prefix reuse off, which this API needs. Try "
        "again in {retry_after_s} s.",
        "The probe of a new engine (see `reuse_switch`) found no room, or the engine changed meanwhile.",
    )
    ENGINE_OVERFLOW = Row(
        "engine_overflow",
        502,
        "engine_overflow",
        "server_error",
        "The inference server ran out of KV cache, which kvgate exists to prevent. Its operator has been told.",
        "The engine said that its context was exceeded although kvgate's ledger had room: foreign traffic, or "
        "a topology that the engine does not tell. See the runbook.",
    )
    ENGINE_FAILED = Row(
        "engine_failed",
        502,
        "engine_failed",
        "server_error",
        "The inference server ended this answer before it was complete.",
        "The engine closed the connection, or sent what is not HTTP, in the middle of an answer.",
    )
    ENGINE_STALLED = Row(
        "engine_stalled",
        504,
        "engine_stalled",
        "server_error",
        "The inference server stopped in the middle of its work: for too long nothing came from it.",
        "The engine sent nothing for `engine.idle_timeout_s` in mid-answer, or nothing at all while it left "
        "`/health` unanswered for that long. A long prefill alone is never cut.",
    )
    INTERNAL = Row(
        "internal",
        500,
        "internal_error",
        "server_error",
        "kvgate failed on this request. Its operator can find it by the request id.",
        "A defect of kvgate; the log has the traceback under the request id.",
    )

    @property
    def label(self) -> str:
        """The metric label and the value of the `x-kvgate-reason` header."""
        return self.value.label

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.value.status


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refusal: its reason, the sentence with its figures filled in, and the figures themselves.

    Args:
        reason: the row of the table.
        message: for the client; never holds prompt or key material.
        figures: numbers that the error body carries (`n_prompt_tokens`, `n_ctx`, ...).
        param: the field of the request that is to blame, where there is one.
        retry_after_s: whole seconds for `retry-after`, where trying again can help.
    """

    reason: Reason
    message: str
    figures: tuple[tuple[str, int | str], ...] = ()
    param: str | None = None
    retry_after_s: int | None = None


RETRY_AFTER_MAX_S = 60


def refusal(
    reason: Reason,
    *,
    figures: tuple[tuple[str, int | str], ...] = (),
    param: str | None = None,
    retry_after_s: float | None = None,
    **fields: object,
) -> Refusal:
    """Fill in a reason's sentence.

    `retry_after_s` is rounded up and held within 1 to 60 s (DESIGN section 8); it is also a field of the
    sentence where the sentence names it.
    """
    retry = None if retry_after_s is None else int(min(max(-(-retry_after_s // 1), 1), RETRY_AFTER_MAX_S))
    message = reason.value.sentence.format(retry_after_s=retry, **fields)
    return Refusal(reason, message, figures, param, retry)
