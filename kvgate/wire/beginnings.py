"""How a conversation begins, as the words by which its later requests are known again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvgate.core.json_list import each_element
from kvgate.core.turns import Kind
from kvgate.ports import History

if TYPE_CHECKING:
    from kvgate.ports import ReadRequest, Texts

TEXT_CHARS: Final = 128
"""Of a text prompt, which grows from request to request, its first so many characters."""


def beginning(part: History | Texts | None, request: ReadRequest) -> str:
    """What stays the same when an application sends its history again and more: all up to the first user's message.

    Empty where an API has no conversations: then all of a tenant's requests are one.
    """
    if part is None:
        return ""
    document = request.document
    member = document.members.get(part.field)
    if member is None:
        return ""
    if not isinstance(part, History) or not isinstance(member.value, list):
        return document.text[member.value_start : min(member.value_end, member.value_start + TEXT_CHARS)]
    for item, (_, end) in zip(part.items, each_element(document, part.field), strict=False):
        if item.kind is Kind.USER:
            return document.text[member.value_start : end]
    return document.text[member.value_start : member.value_end]
