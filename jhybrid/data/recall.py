"""Multi-query associative recall: key-value pairs first, their keys again later.

The task of Zoology (Arora et al., arXiv 2312.04927, section 4 and appendix E): keys and values come
from disjoint halves of the vocabulary, the gap between a pair and its query follows a power law
(short gaps are likelier), and the model is asked for the value where the key appears again.
"""

import numpy as np

from jhybrid.config import AssociativeRecall, require
from jhybrid.data.rows import Example
from jhybrid.data.tokenizer import Tokenizer

# Distinct tokens used, as in the published task; smaller vocabularies use all they have.
TASK_TOKENS = 8192


class AssociativeRecallTask:
    """k1 v1 k2 v2 ... then `num_queries` of the pairs again, in slots of two tokens.

    Slot j after the pairs is taken with probability proportional to (j + 1)**(power - 1). Free
    slots hold random tokens that are no key of the document, so what follows a key is always its
    value. Loss falls on those values in the second part only.
    """

    fingerprint = ""

    def __init__(self, config: AssociativeRecall, tokenizer: Tokenizer):
        ids = tokenizer.ordinary_ids[:TASK_TOKENS]
        half = len(ids) // 2
        self._keys, self._values = ids[:half], ids[half : 2 * half]
        require(
            config.num_pairs < half,
            f"data.sources AssociativeRecall.num_pairs={config.num_pairs}: tokenizer "
            f"{tokenizer.name!r} has keys for fewer than {half} pairs",
        )
        self._config = config
        self.length = config.length

    def example(self, rng: np.random.Generator) -> Example:
        pairs, queries = self._config.num_pairs, self._config.num_queries
        keys = rng.permutation(self._keys)
        keys, fillers = keys[:pairs], keys[pairs:]
        values = rng.permutation(self._values)[:pairs]

        slots = (self.length - 2 * pairs) // 2
        weights = np.arange(1, slots + 1) ** (self._config.power - 1.0)
        chosen = rng.choice(slots, queries, replace=False, p=weights / weights.sum())
        asked = rng.permutation(pairs)[:queries]

        tokens = rng.choice(fillers, self.length + 1)
        tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2] = keys, values
        at = 2 * pairs + 2 * chosen
        tokens[at], tokens[at + 1] = keys[asked], values[asked]
        targets = np.full(self.length, -1, np.int32)
        targets[at] = values[asked]
        return Example(tokens[:-1], targets)
