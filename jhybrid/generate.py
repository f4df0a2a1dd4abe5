"""Continues prompts from a file.

python -m jhybrid.generate --checkpoint runs/default --prompt-file prompts.txt

One prompt per line, or, in a .jsonl file, per object's "prompt". Every row of a batch reads and
goes on at its own length. The same seed gives a prompt the same tokens in a batch of any size.
Exit code 2: bad input, in one line on stderr.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from jhybrid import commandline, memory
from jhybrid.checkpoint import load_model
from jhybrid.data import Tokenizer, check_vocabulary, load_tokenizer
from jhybrid.decoding import PREFILL_TOKENS, Generation, generate
from jhybrid.errors import UserError
from jhybrid.model import HybridLM
from jhybrid.sampling import Sampling


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file; empty lines are none."""
    lines = commandline.read_text(path, "--prompt-file").splitlines()
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"--prompt-file {path}: no prompts")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_json_prompt(line, f"--prompt-file {path}:{n}") for n, line in numbered]


def _json_prompt(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg})") from None
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise UserError(f'{where}: expected an object with a non-empty string "prompt"')
    return prompt


def generate_batches(
    model: HybridLM,
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    seed: int,
    **options,
) -> Iterator[tuple[range, Generation]]:
    """(which prompts, what follows them) for all prompts, in batches of one shape."""
    rows = min(batch_size, len(prompts))
    longest = max(map(len, prompts))
    for start in range(0, len(prompts), rows):
        # the last batch repeats its last prompt, so that one shape is compiled
        index = np.minimum(np.arange(start, start + rows), len(prompts) - 1)
        tokens = np.zeros((rows, longest), np.int32)
        for row, i in enumerate(index):
            tokens[row, : len(prompts[i])] = prompts[i]
        lengths = np.array([len(prompts[i]) for i in index], np.int32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), index)
        generation = generate(model, tokens, lengths, keys=keys, **options)
        yield range(start, min(start + rows, len(prompts))), generation


def continuation(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """The tokens before the end of the document."""
    return list(tokens[: tokens.index(tokenizer.eos)] if tokenizer.eos in tokens else tokens)


def parser() -> argparse.ArgumentParser:
    parser = commandline.Parser(prog="python -m jhybrid.generate", description="Continue prompts.")
    parser.add_argument("--checkpoint", required=True, help="a workdir or an exported checkpoint")
    parser.add_argument("--prompt-file", required=True, type=Path, metavar="FILE")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    parser.add_argument("--top-k", type=int, help="draw among the k likeliest tokens")
    parser.add_argument("--top-p", type=float, help="draw among those that first reach p together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=8, help="prompts at a time")
    parser.add_argument(
        "--prefill-tokens", type=int, default=PREFILL_TOKENS, help="of a prompt at a time"
    )
    parser.add_argument("--out", type=Path, help="also write JSON lines: prompt, completion")
    parser.add_argument("--memory", action="store_true", help="report the state's bytes on stderr")
    commandline.add_set_option(parser)
    return parser


def main() -> int:
    arguments = parser().parse_args()
    choice = Sampling(
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p
    )
    for name in ("batch_size", "max_new_tokens", "prefill_tokens"):
        if getattr(arguments, name) < 1:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} {getattr(arguments, name)}: must be at least 1")
    if not 0 <= arguments.seed < 1 << 32:
        raise UserError(f"--seed {arguments.seed}: must lie in [0, 2^32)")
    texts = read_prompts(arguments.prompt_file)
    commandline.use_compile_cache(None)
    experiment, model = load_model(arguments.checkpoint, arguments.set)
    tokenizer = load_tokenizer(experiment.data.tokenizer)
    check_vocabulary(tokenizer, experiment.model)
    prompts = [list(map(int, ids)) for ids in tokenizer.encode_batch(texts)]
    options = {
        "max_new_tokens": arguments.max_new_tokens,
        "prefill_tokens": arguments.prefill_tokens,
        "choice": choice,
        "stop_token": tokenizer.eos,
        "batch_size": arguments.batch_size,
        "seed": arguments.seed,
    }
    rows, usages = [], None
    for index, generation in generate_batches(model, prompts, **options):
        usages = generation.usages
        for i, tokens in zip(index, np.asarray(generation.tokens).tolist(), strict=False):
            text = tokenizer.decode(continuation(tokenizer, tokens))
            rows.append({"prompt": texts[i], "completion": text})
            print(f"{texts[i]}{text}\n", flush=True)
    if arguments.memory:
        longest = max(map(len, prompts)) + arguments.max_new_tokens
        print(memory.table(memory.memory(model, longest, usages)), file=sys.stderr)
    if arguments.out is not None:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        commandline.write_text(arguments.out, "".join(lines), "--out")
    return 0


if __name__ == "__main__":
    commandline.run(main)
