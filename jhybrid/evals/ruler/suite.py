"""RULER's thirteen tasks with their published arguments (`scripts/synthetic.yaml`)."""

import dataclasses
from collections.abc import Callable

from jhybrid.errors import UserError
from jhybrid.evals.ruler.cwe import CommonWords
from jhybrid.evals.ruler.fwe import FrequentWords
from jhybrid.evals.ruler.haystacks import Essay
from jhybrid.evals.ruler.niah import NeedleInHaystack
from jhybrid.evals.ruler.qa import QuestionAnswering, QuestionSet
from jhybrid.evals.ruler.task import SEED, Task
from jhybrid.evals.ruler.vt import VariableTracking, fit_example

NIAH = {
    "niah_single_1": {"hay": "noise"},
    "niah_single_2": {"hay": "essay"},
    "niah_single_3": {"hay": "essay", "values": "uuids"},
    "niah_multikey_1": {"hay": "essay", "num_keys": 4},
    "niah_multikey_2": {"hay": "needle"},
    "niah_multikey_3": {"hay": "needle", "keys": "uuids", "values": "uuids"},
    "niah_multivalue": {"hay": "essay", "num_values": 4},
    "niah_multiquery": {"hay": "essay", "num_keys": 4, "num_queries": 4},
}
WITHOUT_DATA = (*NIAH, "vt", "cwe", "fwe")
NEEDS = {"qa_1": "--squad", "qa_2": "--hotpotqa"}
TASKS = (*WITHOUT_DATA, *NEEDS)


@dataclasses.dataclass(frozen=True)
class Material:
    """What tasks are made from, besides the word lists."""

    count_tokens: Callable[[str], int]
    essay: Essay
    squad: QuestionSet | None = None
    hotpotqa: QuestionSet | None = None


def build_task(name: str, material: Material, *, seed: int = SEED, faithful: bool = True) -> Task:
    if name in NIAH:
        arguments = NIAH[name]
        essay = material.essay if arguments["hay"] == "essay" else None
        return NeedleInHaystack(name=name, essay=essay, faithful=faithful, **arguments)
    if name == "vt":
        size = fit_example(material.count_tokens, seed)
        return VariableTracking(name=name, example_size=size, seed=seed)
    if name == "cwe":
        return CommonWords(name=name, faithful=faithful)
    if name == "fwe":
        return FrequentWords(name=name, faithful=faithful)
    questions = {"qa_1": material.squad, "qa_2": material.hotpotqa}.get(name)
    if questions is None:
        raise UserError(f"ruler:{name} needs {NEEDS[name]} FILE")
    return QuestionAnswering(name=name, material=questions, faithful=faithful)
