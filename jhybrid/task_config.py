"""Sources of documents that ask something, labelled with their task. Imports no JAX."""

from typing import Literal

from jhybrid.config_fields import frozen, require_positive

# How a question is put to the model; see jhybrid/data/chat.py.
Chat = Literal["plain", "chatml", "qwen3", "llama3"]


@frozen
class TaskFiles:
    """Local .jsonl, .jsonl.gz: one object per line with context, question, answer and task.

    `task` may also stand in an object `metadata`, as may `is_prefix`: true puts the question
    before the context. Documents longer than a row are left out, and counted in the run's log.
    """

    paths: tuple[str, ...]  # files, folders or globs
    weight: float = 1.0
    chat: Chat = "plain"
    answer_only: bool = False  # loss on the answer only
    min_tokens: int = 1  # shorter documents are left out

    def __post_init__(self):
        require_positive("TaskFiles", self, "min_tokens")


@frozen
class GeneratedTask:
    """Endless generated documents of one task, over the embedded prose or Python's own library.

    needle              a sentence with a number, somewhere in prose; which number was it?
    variable_tracking   assignments that hand a value on, among noise; who has the value?
    continuation        prose, and its next sentence
    lead                prose, summarised by its first sentence
    copy_code           code, of which the last lines are to be repeated
    """

    generator: Literal["needle", "variable_tracking", "continuation", "lead", "copy_code"]
    task: str  # one of data.tasks
    weight: float = 1.0
    length: int = 512  # tokens per document at most
    chat: Chat = "plain"
    answer_only: bool = True

    def __post_init__(self):
        require_positive("GeneratedTask", self, "length")
