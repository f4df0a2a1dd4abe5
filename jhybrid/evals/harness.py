"""Our models in the LM Evaluation Harness (EleutherAI/lm-evaluation-harness), the extra `eval`.

    python -m jhybrid.evals.harness run --model jhybrid --model_args checkpoint=DIR --tasks piqa

is lm_eval's own command, which knows no plugins, with one more model. `eval.py --tasks lm:piqa`
runs the same tasks as rows of its results. Inputs longer than `max_length` lose tokens on the left,
as in lm_eval's own models; every such input is counted, and the counts are reported.
"""

import collections
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import lm_eval.models  # noqa: F401  # pyright: ignore[reportMissingImports]
import numpy as np
from lm_eval import utils  # pyright: ignore[reportMissingImports]
from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]

from jhybrid import commandline
from jhybrid.checkpoint import load_model
from jhybrid.config import Experiment
from jhybrid.data import check_vocabulary, load_tokenizer
from jhybrid.decoding import generate
from jhybrid.errors import UserError
from jhybrid.evals.continuations import Request, Score, rounded, score
from jhybrid.evals.perplexity import scorer
from jhybrid.evals.prediction import automatic_batch_size
from jhybrid.model import HybridLM
from jhybrid.sampling import Sampling

MAX_LENGTH = 2048  # tokens, as in lm_eval for models that state no limit
MAX_NEW_TOKENS = 256  # as in lm_eval
SHORTEST_PROMPT = 32  # tokens; shorter ones are padded to this
STOPPING = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")

Pair = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, context, continuation


# lm_eval.models is imported for the names in it: lm_eval does so itself only if it has none yet.
@register_model("jhybrid")
class HarnessModel(TemplateLM):
    """A checkpoint as lm_eval sees it.

    `truncated` counts the inputs that lost tokens, by the kind of request.
    """

    def __init__(
        self,
        checkpoint: str | tuple[Experiment, HybridLM],
        *,
        max_length: int = MAX_LENGTH,
        max_gen_toks: int = MAX_NEW_TOKENS,
        batch_size: int | str | None = None,
        seed: int = 0,
        **unknown: Any,
    ):
        super().__init__()
        # lm_eval always sends these two; where arrays live is for JAX's own settings to say
        if refused := sorted(set(unknown) - {"device", "max_batch_size"}):
            raise UserError(f"--model_args {refused[0]}: unknown to jhybrid")
        loaded = load_model(checkpoint) if isinstance(checkpoint, str) else checkpoint
        experiment, self.model = loaded
        self.text = load_tokenizer(experiment.data.tokenizer)
        check_vocabulary(self.text, experiment.model)
        self.max_length, self.max_gen_toks = int(max_length), int(max_gen_toks)
        self.batch_rows = None if batch_size in (None, "auto") else int(batch_size)
        self.seed = int(seed)
        self.truncated: collections.Counter[str] = collections.Counter()

    @property
    def eot_token_id(self) -> int:
        return self.text.eos

    @property
    def prefix_token_id(self) -> int:
        """What an empty context, or a document, begins with."""
        return self.text.eos if self.text.bos is None else self.text.bos

    @property
    def tokenizer_name(self) -> str:
        return f"{self.text.name}-{self.text.fingerprint[:16]}"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        opening = [] if add_special_tokens is False else list(self.text.opening)
        return opening + self.text.encode(string)

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **_: Any) -> list[tuple[float, bool]]:
        fitted = [self._fit(context, continuation) for _, context, continuation in requests]

        def done(index: int, found: Score) -> None:
            texts = requests[index][0]
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, tuple(found))

        found = score(self.model, fitted, batch_size=self.batch_rows, done=done)
        self._report(
            "loglikelihood",
            sum(len(r[1]) > len(f.context) for r, f in zip(requests, fitted, strict=True)),
            len(requests),
        )
        return [(each.log_likelihood, each.greedy) for each in found]

    def _fit(self, context: Sequence[int], continuation: Sequence[int]) -> Request:
        """The last max_length + 1 tokens of both: the model never reads the last of them."""
        if not 0 < len(continuation) <= self.max_length:
            raise UserError(
                f"max_length={self.max_length}: a continuation has {len(continuation)} tokens"
            )
        room = self.max_length + 1 - len(continuation)
        return Request(tuple(context[-room:]), tuple(continuation))

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Whole documents in windows of max_length, each token predicted once; none is cut."""
        windows, owners = [], []
        for owner, (text,) in enumerate(request.args for request in requests):
            for window in utils.get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
            ):
                windows.append(window)
                owners.append(owner)
        totals = np.zeros(len(requests))
        log_likelihoods = scorer(self.model)
        for length, rows, indices in _by_length([len(read) for read, _ in windows], self._rows):
            inputs, targets = np.zeros((rows, length), np.int32), np.full((rows, length), -1)
            for row, i in enumerate(indices):
                read, predicted = windows[i]
                inputs[row, : len(read)] = read
                targets[row, len(read) - len(predicted) : len(read)] = predicted
            found = log_likelihoods(inputs, targets.astype(np.int32)).astype(np.float64).sum(1)
            np.add.at(totals, [owners[i] for i in indices], found[: len(indices)])
        for (text,), total in zip((r.args for r in requests), totals.tolist(), strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals.tolist()

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        answers: dict[int, str] = {}
        by_options: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            by_options.setdefault(repr(request.args[1]), []).append(i)
        for own in by_options.values():
            options = requests[own[0]].args[1]
            prompts = [requests[i].args[0] for i in own]
            for place, answer in self._answers(prompts, options):
                i = own[place]
                answers[i] = answer
                self.cache_hook.add_partial("generate_until", requests[i].args, answer)
        return [answers[i] for i in range(len(requests))]

    def _answers(self, prompts: Sequence[str], options: dict[str, Any]):
        """(index of the prompt, text before the first of the stop strings), batch by batch."""
        if unknown := sorted(set(options) - set(STOPPING)):
            raise UserError(f"gen_kwargs {unknown[0]}: unknown to jhybrid; known: {STOPPING}")
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else until
        new_tokens = int(options.get("max_gen_toks", self.max_gen_toks))
        room = self.max_length - new_tokens
        if room < 1:
            raise UserError(f"max_length={self.max_length} has no room for {new_tokens} new tokens")
        draws = options.get("do_sample") is not False
        choice = Sampling(
            temperature=float(options.get("temperature", 0.0)) if draws else 0.0,
            top_k=options.get("top_k"),
            top_p=options.get("top_p"),
        )
        encoded = [self.tok_encode(prompt) or [self.prefix_token_id] for prompt in prompts]
        self._report("generate_until", sum(len(ids) > room for ids in encoded), len(encoded))
        encoded = [ids[-room:] for ids in encoded]
        for length, rows, indices in _by_length(list(map(len, encoded)), self._rows):
            padded = np.pad(indices, (0, rows - len(indices)), mode="edge")
            tokens = np.zeros((rows, length), np.int32)
            for row, i in enumerate(padded):
                tokens[row, : len(encoded[i])] = encoded[i]
            generation = generate(
                self.model,
                tokens,
                np.array([len(encoded[i]) for i in padded], np.int32),
                max_new_tokens=new_tokens,
                stop_token=self.text.eos,
                choice=choice,
                keys=jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(self.seed), padded),
            )
            for i, answer in zip(indices, np.asarray(generation.tokens).tolist(), strict=False):
                end = answer.index(self.text.eos) if self.text.eos in answer else len(answer)
                text = self.text.decode(answer[:end])
                for stop in filter(None, until):
                    text = text.split(stop)[0]
                yield i, text

    def _rows(self, length: int) -> int:
        return self.batch_rows or automatic_batch_size(length)

    def _report(self, kind: str, cut: int, requests: int) -> None:
        self.truncated[kind] += cut
        if cut:
            logging.getLogger(__name__).warning(
                f"{kind}: {cut} of {requests} inputs are longer than max_length={self.max_length} "
                "and lost tokens on the left"
            )


def _by_length(lengths: Sequence[int], rows: Callable[[int], int]):
    """(rounded length, rows of the arrays, indices) of batches, long ones first."""
    by_length: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        by_length.setdefault(rounded(length, SHORTEST_PROMPT), []).append(i)
    for length in sorted(by_length, reverse=True):
        indices = by_length[length]
        size = min(rows(length), rounded(len(indices)))
        for start in range(0, len(indices), size):
            yield length, size, indices[start : start + size]


def _main() -> int:
    commandline.use_compile_cache(None)
    cli_evaluate()
    return 0


if __name__ == "__main__":
    commandline.run(_main)
