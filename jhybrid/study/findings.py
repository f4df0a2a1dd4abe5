"""What the runs at hand say to the study's three questions (arXiv 2507.06457), with intervals.

1. Does recall rise, and does language modelling stay, as more layers are full attention?
2. Does a mixer's rank alone predict its rank in a hybrid?
3. Which properties of a mixer go with recall in hybrids: gating, delta rule, hierarchy?

Only finished runs count. Intervals are 95 %: Student's t over seeds for means and paired
differences, over mixers for properties (Welch); a percentile bootstrap over seeds for rank
correlations.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.95
DRAWS = 2000  # of the bootstrap

# Of a linear mixer: the forget gate depends on the token; writes correct what the memory holds;
# the forget gate's lower bound rises with depth.
PROPERTIES: Mapping[str, tuple[str, ...]] = {
    "selective gating": ("hgrn", "hgrn2", "gla", "mamba2", "rwkv6", "gated_delta_net", "kda"),
    "delta rule": ("delta_net", "gated_delta_net", "kda"),
    "hierarchy": ("hgrn", "hgrn2"),
}
WITHOUT_ALL = ("retnet", "lightning")  # the other mixers that these properties are asked of

Result = Mapping[str, Any]


class Estimate(NamedTuple):
    """A number with its interval; None where one sample or none gives no interval."""

    value: float
    low: float | None
    high: float | None
    samples: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean(samples: Sequence[float]) -> Estimate:
    values = np.asarray(samples, float)
    middle, count = float(values.mean()), len(values)
    if count < 2:
        return Estimate(middle, None, None, count)
    reach = _quantile(count - 1) * float(values.std(ddof=1)) / math.sqrt(count)
    return Estimate(middle, middle - reach, middle + reach, count)


def difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Mean of `first` less that of `second`, by Welch's interval."""
    a, b = np.asarray(first, float), np.asarray(second, float)
    middle = float(a.mean() - b.mean())
    if min(len(a), len(b)) < 2:
        return Estimate(middle, None, None, len(a) + len(b))
    parts = np.array([a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)])
    if parts.sum() == 0:
        return Estimate(middle, middle, middle, len(a) + len(b))
    degrees = parts.sum() ** 2 / (parts**2 / [len(a) - 1, len(b) - 1]).sum()
    reach = _quantile(degrees) * math.sqrt(parts.sum())
    return Estimate(middle, middle - reach, middle + reach, len(a) + len(b))


def _quantile(degrees: float) -> float:
    """Of Student's t, which |t| exceeds with probability 1 - LEVEL."""
    return float(stats.t.ppf((1 + LEVEL) / 2, degrees))


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of ranks, ties at their mean; NaN when one side has no order."""
    a, b = stats.rankdata(first), stats.rankdata(second)
    if a.std() == 0 or b.std() == 0:
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


class Measure(NamedTuple):
    """A number of a run that the questions are about."""

    name: str
    of: Callable[[Result], float | None]
    more_is_better: bool


def recall(name: str, length: int) -> Measure:
    """Share of right answers of one task at one length, over all distances."""

    def of(result: Result) -> float | None:
        rows = [r for r in result["measures"] if (r["measure"], r.get("length")) == (name, length)]
        asked = sum(row["count"] for row in rows)
        return sum(row["value"] * row["count"] for row in rows) / asked if rows else None

    return Measure(f"{name} at {length}", of, True)


def single(name: str, length: int) -> Measure:
    """A measure of which a run has one number per length."""

    def of(result: Result) -> float | None:
        rows = [r for r in result["measures"] if (r["measure"], r.get("length")) == (name, length)]
        return rows[0]["value"] if rows else None

    return Measure(f"{name} at {length}", of, not name.startswith(("bits", "loss")))


def average(label: str, prefix: str, suffix: str, length: int) -> Measure:
    """Mean over the measures at a length whose names begin and end so."""

    def of(result: Result) -> float | None:
        values = [
            row["value"]
            for row in result["measures"]
            if row.get("length") == length
            and row["measure"].startswith(prefix)
            and row["measure"].endswith(suffix)
        ]
        return float(np.mean(values)) if values else None

    return Measure(f"{label} at {length}", of, True)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One question answered in a sentence, or why it cannot be; `numbers` are what it rests on."""

    question: str
    answer: str
    numbers: Mapping[str, Estimate]


class Samples:
    """One measure of every finished run, by (mixer, layout) and seed."""

    def __init__(self, results: Sequence[Result], measure: Measure):
        self.measure = measure
        self.by_cell: dict[tuple[str, str], dict[int, float]] = {}
        self.shares: dict[str, float] = {}  # of full layers, by layout
        for result in results:
            value = measure.of(result) if result["status"] == "finished" else None
            if value is not None:
                cell = (result["mixer"], result["layout"])
                self.by_cell.setdefault(cell, {})[result["seed"]] = value
                self.shares[result["layout"]] = result["full_share"]

    def estimate(self, cell: tuple[str, str]) -> Estimate:
        return mean(list(self.by_cell[cell].values()))

    def mixers(self, *layouts: str) -> list[str]:
        """Those that were run in all of these layouts."""
        names = dict.fromkeys(mixer for mixer, _ in self.by_cell)
        return [m for m in names if all((m, layout) in self.by_cell for layout in layouts)]

    def hybrids(self) -> list[str]:
        """Layouts between none and all, from few full layers to many."""
        between = [layout for layout, share in self.shares.items() if 0 < share < 1]
        return sorted(between, key=lambda layout: self.shares[layout])

    def gain(self, mixer: str, layout: str, base: str = "pure") -> list[float]:
        """Differences of the seeds that both layouts have."""
        one, other = self.by_cell[mixer, layout], self.by_cell[mixer, base]
        return [one[seed] - other[seed] for seed in one if seed in other]


def effect_of_ratio(samples: Samples) -> Finding:
    question = f"Does {samples.measure.name} rise with the share of full attention?"
    layouts = samples.hybrids()
    mixers = samples.mixers("pure", layouts[-1]) if layouts else []
    if not mixers:
        return Finding(question, "Not answered: no mixer was run both pure and in a hybrid.", {})
    most = layouts[-1]
    numbers = {
        f"{mixer}: {layout} less pure": mean(samples.gain(mixer, layout))
        for mixer in mixers
        for layout in layouts
        if (mixer, layout) in samples.by_cell
    }
    last = [numbers[f"{mixer}: {most} less pure"] for mixer in mixers]
    rises = sum(e.low is not None and e.low > 0 for e in last)
    falls = sum(e.high is not None and e.high < 0 for e in last)
    total = mean([e.value for e in last])
    numbers["all mixers"] = total
    answer = (
        f"From pure to {most} it changes by {total} on average over {len(mixers)} mixers; it rises "
        f"for {rises} and falls for {falls} of them beyond the interval of their seeds."
    )
    return Finding(question, answer, numbers)


def rank_in_hybrids(samples: Samples) -> Finding:
    question = f"Does a mixer's rank alone predict its rank in a hybrid, by {samples.measure.name}?"
    numbers = {}
    for layout in samples.hybrids():
        mixers = samples.mixers("pure", layout)
        if len(mixers) >= 3:
            numbers[layout] = _rank_correlation(samples, mixers, layout)
    if not numbers:
        return Finding(question, "Not answered: it takes three mixers, pure and hybrid.", {})
    said = "; ".join(f"{layout} {estimate}" for layout, estimate in numbers.items())
    certain = all(e.low is not None and e.low > 0 for e in numbers.values())
    verdict = "Yes, at every ratio" if certain else "Not for certain"
    best = {layout: _best(samples, layout) for layout in ("pure", *numbers)}
    leaders = ", ".join(f"{mixer} ({layout})" for layout, mixer in best.items())
    return Finding(
        question, f"{verdict}: rank correlation with pure is {said}. Best: {leaders}.", numbers
    )


def _rank_correlation(samples: Samples, mixers: Sequence[str], layout: str) -> Estimate:
    random = np.random.default_rng(0)
    alone, hybrid = (
        [list(samples.by_cell[mixer, of].values()) for mixer in mixers] for of in ("pure", layout)
    )
    value = spearman([float(np.mean(x)) for x in alone], [float(np.mean(x)) for x in hybrid])
    if min(map(len, alone + hybrid)) < 2:
        return Estimate(value, None, None, len(mixers))

    def drawn(cells: list[list[float]]) -> list[float]:
        return [float(np.mean(random.choice(cell, len(cell)))) for cell in cells]

    found = [spearman(drawn(alone), drawn(hybrid)) for _ in range(DRAWS)]
    low, high = np.nanquantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high), len(mixers))


def _best(samples: Samples, layout: str) -> str:
    sign = 1 if samples.measure.more_is_better else -1
    mixers = [mixer for mixer, of in samples.by_cell if of == layout]
    return max(mixers, key=lambda mixer: sign * samples.estimate((mixer, layout)).value)


def properties_that_matter(samples: Samples) -> Finding:
    question = f"Which properties of a mixer go with {samples.measure.name} in hybrids?"
    layouts = samples.hybrids()
    known = {*WITHOUT_ALL, *(mixer for of in PROPERTIES.values() for mixer in of)}
    mixers = [m for m in samples.mixers(*layouts) if m in known] if layouts else []
    of_mixer = {
        m: float(np.mean([samples.estimate((m, layout)).value for layout in layouts]))
        for m in mixers
    }
    numbers = {}
    for name, having in PROPERTIES.items():
        groups = [[v for m, v in of_mixer.items() if (m in having) is w] for w in (True, False)]
        if all(groups):
            numbers[name] = difference(*groups)
    if not numbers:
        return Finding(question, "Not answered: no mixers with and without one.", {})
    said = "; ".join(f"{name} {estimate}" for name, estimate in numbers.items())
    return Finding(
        question,
        f"Mixers with it less mixers without, over {', '.join(layouts)}: {said}.",
        numbers,
    )


def findings(results: Sequence[Result], measures: Sequence[Measure]) -> list[Finding]:
    """The three questions, for each measure of recall and of language modelling."""
    samples = [Samples(results, measure) for measure in measures]
    samples = [of for of in samples if of.by_cell]
    questions = (effect_of_ratio, rank_in_hybrids, properties_that_matter)
    return [question(of) for question in questions for of in samples]
