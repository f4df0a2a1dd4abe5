"""How a prompt and its answer are laid out as tokens: plainly, or as one turn of a chat.

A format's special tokens are looked up by name; the same letters in a prompt stay letters.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from jhybrid.data.tokenizer import Tokenizer
from jhybrid.task_config import Chat


class Format(NamedTuple):
    turn: str  # up to the answer
    end: str | None  # special token after the answer; None: the end-of-text token


CHATML = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
LLAMA3 = (
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{prompt}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
FORMATS: Mapping[Chat, Format] = {
    "plain": Format("{prompt}", None),
    "chatml": Format(CHATML, "<|im_end|>"),
    "qwen3": Format(CHATML + "<think>\n\n</think>\n\n", "<|im_end|>"),  # told not to think
    "llama3": Format(LLAMA3, "<|eot_id|>"),
}
SPECIAL = re.compile(r"(<\|\w+\|>)")


def prompt_ids(tokenizer: Tokenizer, chat: Chat, prompt: str, prefix: str = "") -> list[int]:
    """Everything before the answer, whose first words `prefix` may be."""
    before, after = FORMATS[chat].turn.split("{prompt}")
    *opening, start = SPECIAL.split(before)  # text and special tokens take turns
    first, *closing = SPECIAL.split(after)
    *pieces, last = [*opening, start + prompt + first, *closing]
    ids: list[int] = []
    for i, piece in enumerate([*pieces, last + prefix]):
        if i % 2:
            ids.append(tokenizer.special(piece))
        elif piece:
            ids += tokenizer.encode(piece)
    return ids


def answer_ids(tokenizer: Tokenizer, chat: Chat, answer: str) -> list[int]:
    """The answer and what ends it."""
    end = FORMATS[chat].end
    return [*tokenizer.encode(answer), tokenizer.eos if end is None else tokenizer.special(end)]
