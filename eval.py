"""Measures a checkpoint: perplexity by context length, RULER, tasks of lm_eval.

    python eval.py --checkpoint runs/default --tasks perplexity,ruler --lengths 1024,2048

Run the same command again to go on where it stopped. Exit codes: 0, also when some task does not
fit some length; 2 bad input, in one line on stderr.
"""

import argparse
import sys
from pathlib import Path

from jhybrid import commandline
from jhybrid.checkpoint import load_model
from jhybrid.data import load_tokenizer
from jhybrid.errors import UserError
from jhybrid.evals import options as evals
from jhybrid.evals import report
from jhybrid.evals.evaluate import evaluate
from jhybrid.evals.ruler.fitting import DoesNotFitError
from jhybrid.evals.ruler.source import RulerSource


def parser() -> argparse.ArgumentParser:
    parser = commandline.Parser(prog="eval.py", description="Measure a checkpoint.")
    parser.add_argument("--checkpoint", required=True, help="a workdir or an exported checkpoint")
    parser.add_argument("--tasks", default="perplexity,ruler", help="also ruler:NAME, lm:NAME")
    parser.add_argument("--lengths", default="1024", help="in tokens, answers included")
    parser.add_argument("--num-samples", type=int, default=20, help="per RULER task and length")
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    parser.add_argument("--essays", metavar="FILE", help="PaulGrahamEssays.json or a text file")
    parser.add_argument("--squad", metavar="FILE", help="SQuAD v2 dev, for ruler:qa_1")
    parser.add_argument(
        "--hotpotqa", metavar="FILE", help="HotpotQA dev distractor, for ruler:qa_2"
    )
    parser.add_argument("--text", metavar="FILE", help="for perplexity; default: validation text")
    parser.add_argument("--limit", type=int, help="documents of each lm: task; default: all")
    parser.add_argument("--include-path", metavar="DIR", help="more task files for lm: tasks")
    parser.add_argument("--batch-size", type=int, help="rows at a time; default: by length")
    parser.add_argument("--cache", type=Path, default=evals.default_cache(), help="sample sets")
    parser.add_argument("--seed", type=int, default=evals.SEED, help="of the samples")
    parser.add_argument(
        "--faithful",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="NVIDIA's fixed orders of needles, words and documents; else random per sample",
    )
    commandline.add_set_option(parser)
    parser.add_argument("--print-prompt", metavar="TASK:LENGTH:SAMPLE", help="print it and stop")
    return parser


def main() -> int:
    arguments = parser().parse_args()
    options = evals.EvalOptions(
        checkpoint=arguments.checkpoint,
        tasks=evals.parse_tasks(
            arguments.tasks,
            with_squad=arguments.squad is not None,
            with_hotpotqa=arguments.hotpotqa is not None,
        ),
        lengths=evals.parse_lengths(arguments.lengths),
        num_samples=arguments.num_samples,
        out=arguments.out,
        essays=arguments.essays,
        squad=arguments.squad,
        hotpotqa=arguments.hotpotqa,
        text=arguments.text,
        limit=arguments.limit,
        include_path=arguments.include_path,
        batch_size=arguments.batch_size,
        cache=arguments.cache,
        seed=arguments.seed,
        faithful=arguments.faithful,
    )
    wanted = evals.parse_prompt(arguments.print_prompt) if arguments.print_prompt else None
    commandline.use_compile_cache(None)
    experiment, model = load_model(options.checkpoint, arguments.set)
    if wanted is not None:
        task, length, index = wanted
        source = RulerSource.load(options, load_tokenizer(experiment.data.tokenizer))
        try:
            sys.stdout.write(source.sample(task, length, index).prompt)
        except DoesNotFitError as error:
            raise UserError(f"--print-prompt {arguments.print_prompt}: {error}") from None
        return 0
    results = evaluate(options, experiment, model)
    print(report.table(results.rows, results.averages))
    print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    commandline.run(main)
