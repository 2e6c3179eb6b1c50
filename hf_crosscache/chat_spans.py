"""Where the messages of a conversation stand in a model's own chat template: what two models share that have different ones."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from .errors import AlignmentError
from .token_spans import TokenSpans

_MARK = "\ue000{}\ue001"  # private characters, which no template has


def chat_spans(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], *, side: str, **settings: Any) -> TokenSpans:
    """Tokenize a conversation by the tokenizer's chat template; the text is what the messages say, and the template's tokens spell nothing.

    Args:
        messages: as `apply_chat_template` takes them, text alone.
        side: "source" or "target", for the errors.
        settings: of `apply_chat_template`, such as add_generation_prompt.

    Returns:
        Spans over the messages' contents, without the whitespace around each, one behind the other.

    Raises:
        AlignmentError: the template leaves a message out or changes it; it says which. Or as `TokenSpans.of_ids`.
    """
    contents = _contents(messages, side)
    pattern, rendered = (
        str(tokenizer.apply_chat_template(some, **{**settings, "tokenize": False})) for some in (_marked(messages), messages)
    )
    spans: list[tuple[int, int]] = []
    at, trailing = 0, ""
    for number, content in enumerate(contents):
        before, found, pattern = pattern.partition(_MARK.format(number))
        said = content.strip()
        leading = content[: len(content) - len(content.lstrip())]
        # A template keeps the whitespace around a message, or strips it.
        openings = [behind + before + ahead for behind in (trailing, "") for ahead in (leading, "")]
        start = next((at + len(opening) for opening in openings if rendered.startswith(opening + said, at)), None)
        if not found or start is None:
            raise AlignmentError(
                f"The {side}'s chat template leaves out message {number}, or changes it: {_excerpt(said)} was said, and from "
                f"character {at} on it has {_excerpt(rendered[at:])}. Pass what each model has read as ids and text (TokenSpans.of_ids)."
            )
        at, trailing = start + len(said), content[len(content.rstrip()) :]
        spans.append((start, at))
    whole = TokenSpans.of_text(tokenizer, rendered, side=side, add_special_tokens=False)
    return whole.within(_in_bytes(rendered, spans))


def _contents(messages: list[dict[str, Any]], side: str) -> list[str]:
    for number, message in enumerate(messages):
        if not isinstance(message.get("content"), str):
            raise AlignmentError(f"The {side}'s message {number} is not a text: text alone can be aligned.")
    return [message["content"] for message in messages]


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**message, "content": _MARK.format(number)} for number, message in enumerate(messages)]


def _in_bytes(text: str, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found, at, byte = [], 0, 0
    for start, end in spans:
        first = byte + len(text[at:start].encode())
        at, byte = end, first + len(text[start:end].encode())
        found.append((first, byte))
    return found


def _excerpt(text: str) -> str:
    return repr(text[:40])
