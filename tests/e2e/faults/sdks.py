"""Plays a recorded answer to the API's own SDK, and tells what it raised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import anthropic
import httpx2
import openai

if TYPE_CHECKING:
    from tests.e2e.faults.acts import Done
    from tests.e2e.faults.asking import Ask

USER: Final[Any] = [{"role": "user", "content": "x"}]


def read_by_sdk(ask: Ask, done: Done) -> tuple[int | None, str | None]:
    """The status and the code of the exception; an error event has no status."""
    answered = httpx2.Response(done.status, headers={"content-type": done.content_type}, content=done.body)
    with httpx2.Client(transport=httpx2.MockTransport(lambda _: answered)) as http:
        try:
            _ask(ask, http)
        except openai.APIError as error:
            return getattr(error, "status_code", None), error.code
        except anthropic.APIStatusError as error:
            found: Any = error.body
            # An error event comes inside a 200.
            return (error.status_code if done.status != 200 else None), found["error"]["reason"]
    raise AssertionError("the SDK took an error for an answer")


def _ask(ask: Ask, http: httpx2.Client) -> None:
    """Ask, and read to the end."""
    options: dict[str, Any] = {"base_url": "http://gate/v1", "api_key": "x", "max_retries": 0, "http_client": http}
    if ask.dialect == "anthropic_messages":
        options["base_url"] = "http://gate"
        found: Any = anthropic.Anthropic(**options).messages.create(
            model="x", max_tokens=8, messages=USER, stream=ask.stream
        )
    else:
        client = openai.OpenAI(**options)
        create: dict[str, Any] = {
            "openai_chat": lambda: client.chat.completions.create(model="x", messages=USER, stream=ask.stream),
            "openai_completions": lambda: client.completions.create(model="x", prompt="x", stream=ask.stream),
            "openai_responses": lambda: client.responses.create(model="x", input="x", stream=ask.stream),
        }
        found = create[ask.dialect]()
    if ask.stream:
        for event in found:
            if getattr(event, "type", "") == "error":  # OpenAI's SDK hands this one to its user
                raise openai.APIError(event.message, httpx2.Request("POST", "http://gate"), body={"code": event.code})
