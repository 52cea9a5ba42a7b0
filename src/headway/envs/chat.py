"""Conversations as token ids, each message rendered once; what the policy said is never tokenized again.

A tokenizer's own `chat_template` is used. One without a template (a character tokenizer, a base model) gets
`PLAIN_TEMPLATE`: `role: content`, closed by the end-of-text token and a newline.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headway.types import Ints

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)

_SAID = "5f0c9e1b"
"""Stands for an assistant message while a template is rendered."""


def prompt_ids(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> Ints:
    """The conversation so far, with the assistant's next message opened.

    Example: `prompt_ids(tokenizer, [{"role": "user", "content": "What is 6 × 7?"}])`
    """
    return _encode(tokenizer, _render(tokenizer, messages))


def observation_ids(tokenizer: Any, role: str, text: str, after_stop: bool) -> Ints:
    """What follows an assistant message: its closing, a message of `role` with `text`, the next one's opening.

    Derived by rendering a conversation whose assistant message is a placeholder and cutting right behind it.
    With `after_stop` the policy sampled the closing token itself, so it is left out. Special tokens inside
    `text` are removed: a tool must not be able to open messages of its own.
    """
    message = {"role": role, "content": _without_special_tokens(tokenizer, text)}
    ids = _encode(tokenizer, _after_said(tokenizer, [message]))
    return ids[1:] if after_stop and len(ids) and int(ids[0]) in stop_token_ids(tokenizer) else ids


def stop_token_ids(tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an assistant message: end-of-text, and what the template closes a message with."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    closing = _encode(tokenizer, _after_said(tokenizer, []))[:1].tolist()
    ids += [token for token in closing if token in _special_tokens(tokenizer) and token not in ids]
    if not ids:
        raise ValueError("the tokenizer has neither an eos_token nor a chat template that closes a message")
    return tuple(ids)


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    return {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}


def _without_special_tokens(tokenizer: Any, text: str) -> str:
    special = re.compile("|".join(map(re.escape, _special_tokens(tokenizer).values())) or "(?!)")
    # Taking one out may put another one together.
    while special.search(text):
        text = special.sub("", text)
    return text


def _after_said(tokenizer: Any, following: list[dict[str, str]]) -> str:
    """What the template puts behind an assistant message that is followed by these messages."""
    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}, *following]
    rendered = _render(tokenizer, conversation, open_next=bool(following))
    _, found, rest = rendered.partition(_SAID)
    if not found:
        raise ValueError("the tokenizer's chat template does not show assistant messages as they are")
    return rest


def _render(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, open_next: bool = True) -> str:
    return tokenizer.apply_chat_template(
        list(messages),
        chat_template=tokenizer.chat_template or PLAIN_TEMPLATE,
        add_generation_prompt=open_next,
        tokenize=False,
        # Some templates print today's date; the same index must name the same prompt tomorrow.
        date_string="01 Jan 2025",
    )


def _encode(tokenizer: Any, text: str) -> Ints:
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
