"""Makes the sample sets an evaluation asks for, from the files it names."""

import dataclasses

from jhybrid.data import Tokenizer, embedded_text
from jhybrid.errors import UserError
from jhybrid.evals.options import EvalOptions
from jhybrid.evals.ruler import fitting, generation, suite
from jhybrid.evals.ruler.haystacks import Essay, load_essays
from jhybrid.evals.ruler.qa import QuestionSet, load_hotpotqa, load_squad
from jhybrid.evals.ruler.task import Sample, Task


@dataclasses.dataclass(frozen=True)
class RulerSource:
    options: EvalOptions
    tokenizer: Tokenizer
    material: suite.Material

    @classmethod
    def load(cls, options: EvalOptions, tokenizer: Tokenizer) -> "RulerSource":
        """Reads the essays and question files; the embedded prose stands in for the essays.

        Raises:
            UserError: a file is not what it should be, or has fewer questions than samples.
        """
        material = suite.Material(
            count_tokens=lambda prompt: len(tokenizer.encode_batch([prompt])[0]),
            essay=load_essays(options.essays) if options.essays else _public_domain(),
            squad=load_squad(options.squad) if options.squad else None,
            hotpotqa=load_hotpotqa(options.hotpotqa) if options.hotpotqa else None,
        )
        for flag, questions in (("squad", material.squad), ("hotpotqa", material.hotpotqa)):
            if questions is not None and len(questions.questions) < options.num_samples:
                raise UserError(
                    f"--num-samples {options.num_samples}: --{flag} {questions.source} has only "
                    f"{len(questions.questions)} questions with an answer"
                )
        return cls(options, tokenizer, material)

    def task(self, name: str) -> Task:
        return suite.build_task(
            name, self.material, seed=self.options.seed, faithful=self.options.faithful
        )

    def key(self, name: str, length: int) -> generation.SetKey:
        material = self._material_of(name)
        return generation.SetKey(
            task=name,
            length=length,
            num_samples=self.options.num_samples,
            seed=self.options.seed,
            faithful=self.options.faithful,
            tokenizer=self.tokenizer.fingerprint,
            material=material.sha256 if material else "",
        )

    def samples(self, task: Task, length: int) -> list[generation.Row]:
        """The whole set, from the cache where it is there.

        Raises:
            DoesNotFitError: the task is longer than `length` even with its least haystack.
        """
        return generation.load_or_generate(
            task, self.key(task.name, length), self.material.count_tokens, self.options.cache
        )

    def sample(self, name: str, length: int, index: int) -> Sample:
        """One sample of a set, made alone."""
        task, count_tokens = self.task(name), self.material.count_tokens
        questions = self._material_of(name)
        if isinstance(questions, QuestionSet) and index >= len(questions.questions):
            raise UserError(f"ruler:{name} has no sample {index}: {questions.source} is shorter")
        seed = self.options.seed
        size = fitting.fitted_size(task, length, seed, count_tokens)
        return fitting.draw_within(task, length, seed, index, size, count_tokens)[0]

    def _material_of(self, name: str) -> Essay | QuestionSet | None:
        if suite.NIAH.get(name, {}).get("hay") == "essay":
            return self.material.essay
        return {"qa_1": self.material.squad, "qa_2": self.material.hotpotqa}.get(name)


def _public_domain() -> Essay:
    return Essay.of(" ".join(embedded_text("train")), "pd", "the embedded training text")
