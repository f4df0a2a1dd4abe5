"""Trains the shipped byte-level BPE (4,096 entries) on the training part of the embedded corpus.

python -m jhybrid.data.train_tokenizer
"""

import gzip

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jhybrid.data.corpus import embedded_text
from jhybrid.data.tokenizer import END_OF_TEXT, SHIPPED_BPE

VOCAB_SIZE = 4096


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(embedded_text("train"), trainer)
    return tokenizer


def main() -> None:
    data = gzip.compress(train().to_str().encode(), compresslevel=9, mtime=0)
    SHIPPED_BPE.write_bytes(data)
    print(f"{SHIPPED_BPE.name}: {len(data)} bytes")


if __name__ == "__main__":
    main()
