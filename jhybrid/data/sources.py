"""Each kind of source in the config as a Grain dataset of rows, for training or validation."""

import functools

from jhybrid.config import (
    AssociativeRecall,
    DataConfig,
    EmbeddedText,
    GeneratedTask,
    Needle,
    SourceConfig,
    TaskFiles,
    TextFiles,
    TokenRecords,
    require,
)
from jhybrid.data.corpus import embedded_text
from jhybrid.data.generated import GeneratedQuestions
from jhybrid.data.needle import NeedleTask
from jhybrid.data.recall import AssociativeRecallTask
from jhybrid.data.records import RecordStore
from jhybrid.data.rows import PackedRows, SyntheticRows, TokenStore
from jhybrid.data.stores import TextStore, TokenRange
from jhybrid.data.tasks import TaskRows, TaskStore, of_split, read_tasks
from jhybrid.data.text import SUFFIXES, Split, find_files, read_documents, split_documents
from jhybrid.data.tokenizer import Tokenizer

Generated = AssociativeRecall | Needle | GeneratedTask


def is_synthetic(source: SourceConfig) -> bool:
    return isinstance(source, Generated)


def source_rows(
    config: DataConfig, index: int, split: Split, tokenizer: Tokenizer
) -> PackedRows | SyntheticRows:
    """Rows of config.sources[index]."""
    source = config.sources[index]
    field = f"data.sources.{index}"
    length, alignment = config.sequence_length, config.document_alignment
    common = {
        "seed": (config.seed, index, 0 if split == "train" else 1),
        "pad": tokenizer.eos,
        "name": f"{field} ({type(source).__name__})",
    }
    if isinstance(source, Generated):
        require(
            source.length <= length,
            f"{field}.length={source.length} is longer than data.sequence_length={length}",
        )
        if isinstance(source, AssociativeRecall):
            task = AssociativeRecallTask(source, tokenizer)
        elif isinstance(source, GeneratedTask):
            label = config.tasks.index(source.task)
            task = GeneratedQuestions(source, label, tokenizer, split)
        else:
            task = NeedleTask(source, tokenizer, split)
        return SyntheticRows(task, length, alignment, **common)
    if isinstance(source, TaskFiles):
        documents = read_tasks(source, config.tasks, field)
        documents = of_split(documents, config.validation_fraction, split)
        store = TaskStore(documents, source, tokenizer, most=length + 1, field=field)
        rows = TaskRows(store, length, alignment, **common)
    else:
        store = token_store(config, source, split, tokenizer, field)
        rows = PackedRows(store, length, alignment, **common)
    require(len(rows) > 0, f"{field}: no {split} text")
    return rows


def token_store(
    config: DataConfig, source: SourceConfig, split: Split, tokenizer: Tokenizer, field: str
) -> TokenStore:
    """The documents of one split of a source that is text, each ended by the end-of-text token."""
    fraction = config.validation_fraction
    if isinstance(source, EmbeddedText):
        return _embedded_store(split, fraction, tokenizer)
    if isinstance(source, TextFiles):
        files = find_files(source.paths, SUFFIXES, f"{field}.paths")
        texts = [text for file in files for text in read_documents(file, source.text_field)]
        return TextStore(split_documents(texts, fraction)[split], tokenizer)
    assert isinstance(source, TokenRecords)
    records = RecordStore(source.paths, tokenizer, f"{field}.paths")
    total = int(records.lengths.sum())
    cut = round(total * (1 - fraction))
    return TokenRange(records, *((0, cut) if split == "train" else (cut, total)))


@functools.lru_cache(maxsize=8)
def _embedded_store(split: Split, fraction: float, tokenizer: Tokenizer) -> TextStore:
    return TextStore(embedded_text(split, fraction), tokenizer)
