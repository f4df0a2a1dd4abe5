"""Runs the tasks of an evaluation on a model and keeps their results."""

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from jhybrid.config import Experiment
from jhybrid.data import Tokenizer, check_vocabulary, load_tokenizer
from jhybrid.errors import UserError
from jhybrid.evals import report, text
from jhybrid.evals.jobs import Job, PerplexityJob, RulerJob
from jhybrid.evals.options import EvalOptions
from jhybrid.evals.perplexity import scorer
from jhybrid.evals.prediction import predictor
from jhybrid.evals.results import Predictions, Results, digest
from jhybrid.evals.ruler import generation
from jhybrid.evals.ruler.source import RulerSource
from jhybrid.model import HybridLM
from jhybrid.parameters import flatten
from jhybrid.serialization import to_json

VALUES_PER_PARAMETER = 1024
HELD_OUT_TOKENS = 1 << 18  # of validation text at most, or four windows if that is more
PACKAGES = ("jhybrid", "jax", "flax", "numpy", "tokenizers", "wonderwords")


def evaluate(
    options: EvalOptions,
    experiment: Experiment,
    model: HybridLM,
    announce: Callable[[str], None] = print,
) -> Results:
    """Measures every task at every length that `options.out` does not hold yet."""
    tokenizer = load_tokenizer(experiment.data.tokenizer)
    check_vocabulary(tokenizer, experiment.model)
    fingerprint = model_digest(experiment, model)
    jobs = _jobs(options, experiment, model, tokenizer)
    keys = {name: digest({"model": fingerprint, **job.facts()}) for name, job in jobs.items()}
    results = Results(options.out, _header(options, experiment, tokenizer, fingerprint))
    for name, key in keys.items():
        results.find(*name, key)  # a conflict stops the run before any work
    results.write()
    predictions = Predictions(options.out.with_suffix(".predictions.jsonl"))
    for name, job in jobs.items():
        task, length = name
        if results.find(task, length, keys[name]) is not None:
            announce(f"{task} at {length}: already in {options.out}")
            continue
        start = time.perf_counter()
        row = {"task": task, "length": length, **job.run(predictions, keys[name])}
        row |= {"seconds": round(time.perf_counter() - start, 2), "key": keys[name]}
        results.add(row)
        announce(report.line(row))
    return results


def model_digest(experiment: Experiment, model: HybridLM) -> str:
    """Tells models apart: the config, and of each parameter up to 1024 evenly spaced values."""
    found = hashlib.sha256(to_json(experiment.model).encode())
    for path, value in flatten(nnx.state(model, nnx.Param)).items():
        array = np.asarray(value)
        stride = max(1, array.size // VALUES_PER_PARAMETER)
        found.update(f"{path}{array.shape}{array.dtype}".encode())
        found.update(np.ascontiguousarray(array.reshape(-1)[::stride]).tobytes())
    return found.hexdigest()[:16]


def _jobs(
    options: EvalOptions, experiment: Experiment, model: HybridLM, tokenizer: Tokenizer
) -> dict[tuple[str, int], Job]:
    jobs: dict[tuple[str, int], Job] = {}
    if "perplexity" in options.tasks:
        log_likelihoods = scorer(model)
        documents = (
            text.file_documents(options.text, tokenizer)
            if options.text
            else text.config_documents(
                experiment.data,
                "validation",
                tokenizer,
                max(HELD_OUT_TOKENS, 4 * max(options.lengths)),
            )
        )
        tokens = np.concatenate(documents)
        for length in options.lengths:
            jobs["perplexity", length] = PerplexityJob(
                log_likelihoods, tokens, tokenizer, length, options.batch_size
            )
    if options.ruler_tasks:
        source = RulerSource.load(options, tokenizer)
        predict = predictor(model, tokenizer.eos, options.batch_size)
        for name in options.ruler_tasks:
            for length in options.lengths:
                jobs[f"ruler:{name}", length] = RulerJob(predict, source, name, length)
    if options.harness_tasks:
        jobs |= _harness_jobs(options, experiment, model)
    return jobs


def _harness_jobs(
    options: EvalOptions, experiment: Experiment, model: HybridLM
) -> Mapping[tuple[str, int], Job]:
    try:
        from jhybrid.evals import harness_jobs
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "lm_eval":
            raise
        raise UserError("--tasks lm: needs the extra `eval`, the package lm-eval") from None
    return harness_jobs.jobs(options, experiment, model)


def _header(
    options: EvalOptions, experiment: Experiment, tokenizer: Tokenizer, fingerprint: str
) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "checkpoint": options.checkpoint,
        "model": fingerprint,
        "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.fingerprint},
        "options": json.loads(json.dumps(dataclasses.asdict(options), default=str)),
        "versions": {
            "python": platform.python_version(),
            "ruler_rules": generation.VERSION,
            **{package: _version(package) for package in PACKAGES},
        },
        "device": f"{device.platform} {device.device_kind}",
        "config": json.loads(to_json(experiment)),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
