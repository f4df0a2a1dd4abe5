"""Training and evaluation data: corpora, tokenizers, packed batches through Grain."""

from jhybrid.data.corpus import embedded_text as embedded_text
from jhybrid.data.pipeline import Batch as Batch
from jhybrid.data.pipeline import train_batches as train_batches
from jhybrid.data.pipeline import validation_batches as validation_batches
from jhybrid.data.tokenizer import Tokenizer as Tokenizer
from jhybrid.data.tokenizer import check_vocabulary as check_vocabulary
from jhybrid.data.tokenizer import load_tokenizer as load_tokenizer
