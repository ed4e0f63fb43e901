"""The spellings in which requests ask for trimming, each read as one policy, and none sent on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvgate.core.json_object import Edit
from kvgate.core.tenant import TrimSide, TrimStrategy
from kvgate.core.trim_policy import TrimAsk
from kvgate.wire.fields import OUTPUT_TOKENS_MAX, malformed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvgate.core.json_object import JsonObject

FIELDS: Final = (
    "truncation",
    "transforms",
    "truncate_prompt_tokens",
    "truncation_side",
    "context_management",
    "kvgate_pinned",
)
"""None of them reaches the engine, which would cut by itself and by another rule; nor does the plug-in below."""

PLUGIN: Final = "context-compression"

CLEAR_TOOL_USES: Final = "clear_tool_uses_"
"""Anthropic's edit, whatever date its version has; its others (thinking, compaction) are not done here."""

KEEP_TOOL_USES: Final = 3
"""Anthropic's default: so many tool uses stay."""


def of_text(document: JsonObject) -> TrimAsk:
    """What a request with text prompts says: vLLM's fields and OpenRouter's."""
    return _merged([_transforms(document), _plugins(document), _truncate(document)])


def of_chat(document: JsonObject) -> TrimAsk:
    """What a chat says: OpenRouter's fields, vLLM's, and its pins."""
    return _pinned(document, "messages", of_text(document))


def of_responses(document: JsonObject) -> TrimAsk:
    """What a request for a response says: OpenAI's own field, and those of a chat."""
    asked = _merged([_truncation(document), of_text(document)])
    return _pinned(document, "input", asked)


def of_messages(document: JsonObject) -> TrimAsk:
    """What a request in Anthropic's form says: its own field, and its pins."""
    return _pinned(document, "messages", _context_management(document))


def stripped(document: JsonObject) -> Edit:
    """The edit that takes all of them out; another plug-in in the same list stays."""
    plugins = document.get("plugins")
    if not isinstance(plugins, list) or not any(_is_compression(one) for one in plugins):
        return Edit({}, frozenset(FIELDS))
    others = [one for one in plugins if not _is_compression(one)]
    return Edit({"plugins": others}, frozenset(FIELDS)) if others else Edit({}, frozenset((*FIELDS, "plugins")))


def _merged(asks: Iterable[TrimAsk | None]) -> TrimAsk:
    """Several spellings in one request: asking wins over declining; of each detail, the first that is named."""
    found = [ask for ask in asks if ask is not None]
    said = [ask.wanted for ask in found if ask.wanted is not None]
    return TrimAsk(
        wanted=any(said) if said else None,
        strategy=next((ask.strategy for ask in found if ask.strategy), None),
        side=next((ask.side for ask in found if ask.side), None),
        prompt_tokens_max=next((ask.prompt_tokens_max for ask in found if ask.prompt_tokens_max), None),
    )


def _truncation(document: JsonObject) -> TrimAsk | None:
    """OpenAI's responses: `auto` drops items, the oldest first; `disabled` would rather fail."""
    match document.get("truncation"):
        case None:
            return None
        case "auto":
            return TrimAsk(wanted=True)
        case "disabled":
            return TrimAsk(wanted=False)
        case _:
            raise malformed("'truncation' must be 'auto' or 'disabled'", "truncation")


def _transforms(document: JsonObject) -> TrimAsk | None:
    """OpenRouter: `["middle-out"]` asks for it, an empty list declines."""
    given = document.get("transforms")
    if given is None:
        return None
    if not isinstance(given, list) or any(one != "middle-out" for one in given):
        raise malformed("'transforms' must be a list, empty or with 'middle-out'", "transforms")
    return TrimAsk(wanted=True, strategy=TrimStrategy.MIDDLE_OUT) if given else TrimAsk(wanted=False)


def _plugins(document: JsonObject) -> TrimAsk | None:
    """OpenRouter's newer form; what other plug-ins are in the list is nothing to kvgate."""
    given = document.get("plugins")
    own = [one for one in given if _is_compression(one)] if isinstance(given, list) else []
    if not own:
        return None
    enabled = own[0].get("enabled")
    if not isinstance(enabled, bool | None):
        raise malformed(f"'enabled' of the plug-in '{PLUGIN}' must be true or false", "plugins")
    return TrimAsk(wanted=False) if enabled is False else TrimAsk(wanted=True, strategy=TrimStrategy.MIDDLE_OUT)


def _is_compression(plugin: Any) -> bool:
    return isinstance(plugin, dict) and plugin.get("id") == PLUGIN


def _truncate(document: JsonObject) -> TrimAsk | None:
    """vLLM: the most tokens that a prompt may have, -1 for what fits, and the side that is cut off."""
    most, side = document.get("truncate_prompt_tokens"), document.get("truncation_side")
    if side not in (None, "left", "right"):
        raise malformed("'truncation_side' must be 'left' or 'right'", "truncation_side")
    if most is not None and (
        isinstance(most, bool) or not isinstance(most, int) or not (most == -1 or 1 <= most <= OUTPUT_TOKENS_MAX)
    ):
        raise malformed(
            "'truncate_prompt_tokens' must be -1 or a whole number of at least 1", "truncate_prompt_tokens"
        )
    return TrimAsk(
        wanted=None if most is None else True,
        side=None if side is None else TrimSide(side),
        prompt_tokens_max=None if most == -1 else most,
    )


def _context_management(document: JsonObject) -> TrimAsk:
    """Anthropic: `clear_tool_uses_*` asks for tool calls to go first.

    kvgate trims where the context would overflow and not before, so the edit's trigger does not move that; nor does
    it take less than a whole call with its results, so `clear_tool_inputs` changes nothing.
    """
    given = document.get("context_management")
    edits = [] if given is None else given.get("edits") if isinstance(given, dict) else None
    if not isinstance(edits, list | None) or (given is not None and not isinstance(given, dict)):
        raise malformed("'context_management' must be an object with a list of edits", "context_management")
    own = [
        edit for edit in edits or [] if isinstance(edit, dict) and str(edit.get("type")).startswith(CLEAR_TOOL_USES)
    ]
    if not own:
        return TrimAsk()
    keep, tools = own[0].get("keep"), own[0].get("exclude_tools")
    kept = KEEP_TOOL_USES if keep is None else keep.get("value") if isinstance(keep, dict) else None
    if isinstance(kept, bool) or not isinstance(kept, int) or kept < 0:
        raise malformed("'keep' of 'clear_tool_uses' must be {type: tool_uses, value: N}", "context_management")
    if not isinstance(tools, list | None) or not all(isinstance(tool, str) for tool in tools or []):
        raise malformed("'exclude_tools' of 'clear_tool_uses' must be a list of names", "context_management")
    return TrimAsk(
        wanted=True,
        strategy=TrimStrategy.TOOL_OUTPUT_FIRST,
        keep_calls=kept,
        keep_tools=frozenset(tools or ()),
    )


def _pinned(document: JsonObject, field: str, ask: TrimAsk) -> TrimAsk:
    """`kvgate_pinned`: the indexes of messages that stay.

    One field at the top, rather than a mark in each message: it can be sent through every SDK (`extra_body`), and it
    is taken out without touching a message's bytes.
    """
    pinned, listed = document.get("kvgate_pinned"), document.get(field)
    if pinned is None:
        return ask
    there = range(len(listed) if isinstance(listed, list) else 1)
    if not isinstance(pinned, list) or any(type(one) is not int or one not in there for one in pinned):
        raise malformed(f"'kvgate_pinned' must be a list of indexes of '{field}'", "kvgate_pinned")
    return replace(ask, pinned=frozenset(pinned))
