"""RULER's samples: wording, places of the answers, and the rules of each task."""

import collections
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from published import published

from jhybrid.errors import UserError
from jhybrid.evals.ruler import qa, suite, templates, vt, words
from jhybrid.evals.ruler.cwe import CommonWords
from jhybrid.evals.ruler.fwe import FrequentWords
from jhybrid.evals.ruler.haystacks import Essay, ends_sentence, load_essays
from jhybrid.evals.ruler.niah import DEPTHS, NeedleInHaystack

TESTS = Path(__file__).parent
ROOT = TESTS.parent
NUMBER = re.compile(r"[1-9]\d{6}")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
PROSE = " ".join(f"Sentence number {i} says little." for i in range(400))
ESSAY = Essay.of(PROSE, "pd", "test")
NUM_WORDS = 2000


def material() -> suite.Material:
    return suite.Material(count_tokens=lambda text: len(text) // 4, essay=ESSAY)


def draw(task, size, *, length=4096, index=0, seed=0):
    return task.draw(random.Random(seed), size, length, index)


# ---- words and haystacks ----


def test_word_lists_have_the_published_sizes():
    assert len(words.word_list("noun")) * len(words.word_list("adjective")) == 6_171_620
    assert len(words.common_words()) == 8166


def test_random_strings_have_their_shapes():
    rng = random.Random(0)
    nouns, adjectives = set(words.word_list("noun")), words.word_list("adjective")
    for _ in range(50):
        assert NUMBER.fullmatch(words.random_number(rng))
        assert UUID.fullmatch(words.random_uuid(rng))
        word = words.random_word(rng)
        assert any(f"{a}-" in word and word.removeprefix(f"{a}-") in nouns for a in adjectives)


def test_more_words_than_the_pool_holds_are_still_distinct():
    drawn = words.sample_words(random.Random(0), 9000)
    assert len(set(drawn)) == 9000


@pytest.mark.parametrize(
    ("word", "following", "ends"),
    [
        ("end.", "The", True),
        ("end", "The", False),
        ("end.", "the", False),
        ('over!"', "He", True),
        ("what?", "“Why", True),
        ("Mr.", "Starbuck", False),
        ("J.", "Smith", False),
        ("1961.", "1962", True),
    ],
)
def test_sentence_ends_are_recognised(word, following, ends):
    assert ends_sentence(word, following) is ends


@pytest.mark.parametrize("num_words", [1, 5, 6, 1999, 2000, 2001, 4500])
def test_sentences_joined_are_the_repeated_text_cut_at_the_word(num_words):
    repeated = (PROSE.split() * 3)[:num_words]
    sentences = ESSAY.sentences(num_words)
    assert " ".join(sentences) == " ".join(repeated)
    assert all(sentence.endswith("little.") for sentence in sentences[:-1])
    assert len(sentences) == -(-num_words // 5)


def test_essay_files_are_read_and_bad_ones_named(tmp_path):
    (tmp_path / "essays.json").write_text('{"text": "One.  Two\\n\\nthree. Four."}')
    essay = load_essays(str(tmp_path / "essays.json"))
    assert essay.sentences(4) == ["One.", "Two three.", "Four."]
    assert essay.label == "essay"
    (tmp_path / "bad.json").write_text('{"prose": ""}')
    (tmp_path / "empty.txt").write_text(" \n")
    for name in ("bad.json", "empty.txt", "absent.txt"):
        with pytest.raises(UserError, match=name):
            load_essays(str(tmp_path / name))


# ---- needle in a haystack ----


def test_the_singular_wording_is_the_plural_one_rewritten():
    # NVIDIA's niah.py rewrites template and prefix when one value is asked for.
    def singular(text):
        for old, new in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
            text = text.replace(old, new)
        return text

    assert templates.NIAH_SINGULAR.text == singular(templates.NIAH.text)
    assert templates.NIAH_SINGULAR.answer_prefix == singular(templates.NIAH.answer_prefix)


def test_a_noise_prompt_is_character_exact():
    task = suite.build_task("niah_single_1", material())
    sample = draw(task, 5)
    (value,) = sample.outputs
    key = re.search(r"for (\S+) is: ", sample.input).group(1)
    needle = f"One of the special magic numbers for {key} is: {value}."
    noise = (
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    )
    lines = sample.input.split("\n")
    assert lines[0] == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards."
    )
    assert sorted(lines[1:-1]) == sorted([needle] + [noise] * 5)
    assert lines[-1] == (
        f"What is the special magic number for {key} mentioned in the provided text?"
    )
    assert sample.answer_prefix == (
        f" The special magic number for {key} mentioned in the provided text is"
    )
    assert sample.prompt == sample.input + sample.answer_prefix


def test_several_queries_are_listed_and_all_their_values_expected():
    sample = draw(suite.build_task("niah_multiquery", material()), NUM_WORDS)
    asked = re.search(r"magic numbers for (.*) mentioned in the provided text\?$", sample.input)
    keys = re.fullmatch(r"(\S+), (\S+), (\S+), and (\S+)", asked.group(1)).groups()
    for key, value in zip(keys, sample.outputs, strict=True):
        assert f"One of the special magic numbers for {key} is: {value}." in sample.input
    assert sample.answer_prefix == (
        f" The special magic numbers for {asked.group(1)} mentioned in the provided text are"
    )
    assert sample.input.startswith("Some special magic numbers are hidden within")


def test_four_values_of_one_key_are_expected():
    sample = draw(suite.build_task("niah_multivalue", material()), NUM_WORDS)
    needles = re.findall(r"One of the special magic numbers for (\S+) is: (\d+)\.", sample.input)
    assert len({key for key, _ in needles}) == 1
    assert sorted(value for _, value in needles) == sorted(sample.outputs)
    assert len(sample.outputs) == 4


@pytest.mark.parametrize("name", ["niah_multikey_2", "niah_multikey_3"])
def test_every_line_of_a_needle_haystack_is_another_needle(name):
    sample = draw(suite.build_task(name, material()), 50)
    lines = sample.input.split("\n")[1:-1]
    pattern = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\.")
    found = [pattern.fullmatch(line).groups() for line in lines]
    assert len(found) == 51
    assert len({key for _, key, _ in found}) == 51
    assert sum(value == sample.outputs[0] for _, _, value in found) == 1
    if name == "niah_multikey_3":
        assert all(UUID.fullmatch(k) and UUID.fullmatch(v) for _, k, v in found)


@pytest.mark.parametrize("seed", range(10))
def test_the_needle_follows_the_sentence_of_its_depth(seed):
    # The same stream, drawn by hand: key, value, then the depth.
    rng = random.Random(seed)
    words.random_word(rng), words.random_number(rng)
    depth = rng.sample(DEPTHS, 1)[0]
    sentences = ESSAY.sentences(NUM_WORDS)
    before = sentences[: int(len(sentences) * (depth / 100))]
    sample = draw(suite.build_task("niah_single_2", material()), NUM_WORDS, seed=seed)
    context = sample.input.split("\n")[1]
    assert context.startswith(" ".join(before) + " One of the special magic numbers for ")
    assert abs(sample.details["depths"][0] - depth) < 2.5


def test_depths_are_forty_from_the_first_to_the_last_sentence():
    assert len(set(DEPTHS)) == 40
    assert (DEPTHS[0], DEPTHS[1], DEPTHS[-1]) == (0, 3, 100)


def test_faithful_needles_always_appear_third_second_fourth_first():
    for seed in range(20):
        sample = draw(suite.build_task("niah_multivalue", material()), NUM_WORDS, seed=seed)
        appearing = re.findall(r"is: (\d+)\.", sample.input)
        first, second, third, fourth = sample.outputs
        assert appearing == [third, second, fourth, first]


def test_unfaithful_needles_appear_in_every_order():
    task = suite.build_task("niah_multivalue", material(), faithful=False)
    orders = set()
    for seed in range(40):
        sample = draw(task, NUM_WORDS, seed=seed)
        appearing = re.findall(r"is: (\d+)\.", sample.input)
        orders.add(tuple(sample.outputs.index(value) for value in appearing))
    assert len(orders) > 10


# ---- variable tracking ----


def follow(lines: list[str], value: str) -> list[str]:
    """The variables that hold `value` after running the assignments."""
    state: dict[str, str] = {}
    for line in lines:
        if match := re.fullmatch(r"VAR ([A-Z]+) = (?:VAR ([A-Z]+) |(\d+))", line):
            name, source, number = match.groups()
            state[name] = number or state[source]
    return [name for name, held in state.items() if held == value]


def test_the_chain_is_the_answer_and_runs_in_order():
    task = vt.VariableTracking(name="vt", example_size=6)
    sample = draw(task, 30)
    example, question = sample.input.split("\n\nMemorize and track")
    value = re.search(r"assigned the value (\d+) in the text above\.$", sample.input).group(1)
    assert follow(question.split("\n"), value) == list(sample.outputs)
    assert all(re.fullmatch(r"[A-Z]{5}", name) for name in sample.outputs)
    assert question.count(templates.NOISE) == 30
    assert example.count(templates.NOISE) == 6
    assert sample.answer_prefix == (
        " Answer: According to the chain(s) of variable assignment in the text above, 5 variables "
        f"are assigned the value {value}, they are: "
    )


def test_the_example_is_solved_and_differs_between_samples():
    task = vt.VariableTracking(name="vt", example_size=6)
    solutions = set()
    for seed in range(3):
        example = draw(task, 10, seed=seed).input.split("\n\nMemorize and track")[0]
        value = re.search(r"assigned the value (\d+), they are:  (.*)$", example)
        names = follow(example.split("\n"), value.group(1))
        assert value.group(2).split() == names
        assert all(re.fullmatch(r"[A-Z]{3}", name) for name in names)
        solutions.add(value.group(2))
    assert len(solutions) == 3


def test_the_example_is_the_longest_within_500_tokens():
    size = vt.fit_example(lambda text: len(text) // 4)
    assert size * len(templates.NOISE) / 4 < 500 < (size + 6) * len(templates.NOISE) / 4


# ---- common and frequent words ----


@pytest.mark.parametrize(
    ("length", "size", "example", "repeats"),
    [(4096, 60, (40, 10, 3), (30, 3)), (1024, 40, (20, 3, 1), (6, 1))],
)
def test_common_words_are_repeated_as_published(length, size, example, repeats):
    sample = draw(CommonWords(name="cwe"), size, length=length)
    shown, asked = re.fullmatch(
        r"Below is a numbered list of words\. In these words, some appear more often than others\. "
        r"Memorize the ones that appear most often\.\n(.*)\nQuestion: What are the 10 most common "
        r"words in the above list\? Answer: The top 10 words that appear most often in the list "
        r"are: 1\. .* 10\. .*\nBelow is a numbered list of words\. In these words, some appear "
        r"more often than others\. Memorize the ones that appear most often\.\n(.*)\nQuestion: "
        r"What are the 10 most common words in the above list\?",
        sample.input,
    ).groups()
    for text, (count, common, other) in ((shown, example), (asked, (size, *repeats))):
        entries = re.findall(r"(\d+)\. (.*?)(?= \d+\. |$)", text)
        assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
        frequency = collections.Counter(word for _, word in entries)
        assert collections.Counter(frequency.values()) == {common: 10, other: count - 10}
    most = [word for word, n in frequency.items() if n == repeats[0]]
    assert set(most) == set(sample.outputs)


def test_frequent_words_follow_the_zeta_distribution():
    task = FrequentWords(name="fwe")
    size = 10
    sample = draw(task, size, length=4096)
    context = re.search(r"coded words\. (.*)\nQuestion: ", sample.input).group(1).split(" ")
    ranked = collections.Counter(context).most_common()
    scale = task.num_words(size, 4096) / 1.6449340668482264
    assert task.num_words(size, 4096) == (4046 // 6) % (4046 // 32) + size * (4046 // 32)
    assert ranked[0] == ("...", int(scale))
    assert [word for word, _ in ranked[1:4]] == list(sample.outputs)
    assert [n for _, n in ranked] == [
        n for n in (int(scale / rank**2) for rank in range(1, 4046 // 50 + 1)) if n
    ]
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])


@pytest.mark.parametrize("length", [250, 300, 384, 777, 1024, 4096, 100_000])
def test_the_least_frequent_words_text_has_a_unique_answer(length):
    task = FrequentWords(name="fwe")
    sample = draw(task, task.minimum(length, 0), length=length)
    context = re.search(r"coded words\. (.*)\nQuestion: ", sample.input).group(1).split(" ")
    ranked = [n for _, n in collections.Counter(context).most_common()] + [0]
    assert ranked[3] > ranked[4]


# ---- question answering ----


def questions(num_documents: int) -> qa.QuestionSet:
    documents = tuple(f"text {i:03d}" for i in range(num_documents))
    return qa.QuestionSet("squad", "test", documents, (qa.Question("Who?", ("me",), (7,)),), "")


@pytest.mark.parametrize(("size", "slot"), [(3, 1), (5, 4), (10, 8), (20, 18), (50, 19), (100, 70)])
def test_the_faithful_gold_document_is_always_in_the_same_slot(size, slot):
    task = qa.QuestionAnswering(name="qa_1", material=questions(200))
    for seed in range(5):
        sample = draw(task, size, seed=seed)
        documents = re.findall(r"Document (\d+):\n(text \d+)", sample.input)
        assert [text for _, text in documents].index("text 007") == slot
        assert sample.details["gold_slots"] == [slot]
        assert [int(number) for number, _ in documents] == list(range(1, size + 1))


def test_the_unfaithful_gold_document_moves():
    task = qa.QuestionAnswering(name="qa_1", material=questions(200), faithful=False)
    slots = {draw(task, 20, seed=seed).details["gold_slots"][0] for seed in range(30)}
    assert len(slots) > 10


def test_more_slots_than_documents_repeat_the_collection():
    task = qa.QuestionAnswering(name="qa_1", material=questions(10))
    found = collections.Counter(re.findall(r"text \d+", draw(task, 25).input))
    assert sorted(found.values()) == [2] * 5 + [3] * 5


def test_a_question_prompt_is_character_exact():
    task = qa.QuestionAnswering(name="qa_1", material=questions(8))
    assert draw(task, 1).prompt == (
        "Answer the question based on the given documents. Only give me the answer and do not "
        "output any other words.\n\nThe following are given documents.\n\nDocument 1:\ntext 007"
        "\n\nAnswer the question based on the given documents. Only give me the answer and do not "
        "output any other words.\n\nQuestion: Who? Answer:"
    )


def test_squad_questions_come_with_their_article():
    material = qa.load_squad(str(published("data/ruler/squad_v2_dev_cs224n_half.json")))
    assert (len(material.questions), len(material.documents)) == (2910, 646)
    task = qa.QuestionAnswering(name="qa_1", material=material)
    question = material.questions[0]
    sample = draw(task, 5)
    gold = material.documents[question.gold[0]]
    assert f"Document 5:\n{gold}\n\n" in sample.input
    assert any(answer in gold for answer in sample.outputs)
    near = {material.documents[i] for i in (*question.gold, *question.related)}
    assert all(
        text in near for text in re.split(r"(?:^|\n\n)Document \d+:\n", _context(sample))[1:]
    )


def test_hotpotqa_documents_of_a_question_are_all_there():
    material = qa.load_hotpotqa(str(published("data/ruler/hotpotqa.json")))
    assert (len(material.questions), len(material.documents)) == (100, 991)
    task = qa.QuestionAnswering(name="qa_2", material=material)
    for index in range(5):
        sample = draw(task, 20, index=index)
        gold = material.questions[index].gold
        assert task.minimum(4096, index) == len(gold)
        assert all(material.documents[i] in sample.input for i in gold)
        assert len(sample.details["gold_slots"]) == len(gold)


def _context(sample) -> str:
    return sample.input.split("\n\nThe following are given documents.\n\n")[1].split(
        "\n\nAnswer the question based"
    )[0]


@pytest.mark.parametrize("load", [qa.load_squad, qa.load_hotpotqa])
@pytest.mark.parametrize("content", ["{", "[1]", '{"data": 3}', '{"data": []}', None])
def test_bad_question_files_are_named(load, content, tmp_path):
    path = tmp_path / "questions.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"questions\.json"):
        load(str(path))


# ---- all tasks ----


def test_the_suite_has_the_published_arguments():
    tasks = {name: suite.build_task(name, material()) for name in suite.WITHOUT_DATA}
    assert len(tasks) == 11
    assert {name: task.tokens_to_generate for name, task in tasks.items()} == {
        **dict.fromkeys(suite.NIAH, 128),
        "vt": 30,
        "cwe": 120,
        "fwe": 50,
    }
    assert {task.metric for task in tasks.values()} == {"all"}
    niah = [task for task in tasks.values() if isinstance(task, NeedleInHaystack)]
    assert [task.haystack for task in niah] == ["noise", "pd", "pd", "pd", "needle", "needle"] + [
        "pd"
    ] * 2
    with pytest.raises(UserError, match="--squad"):
        suite.build_task("qa_1", material())


def test_samples_are_the_same_in_another_process():
    code = (
        "import hashlib, random, test_ruler_tasks as t\n"
        "text = ''.join(t.draw(t.suite.build_task(n, t.material()), 60).prompt"
        " for n in t.suite.WITHOUT_DATA)\n"
        "print(hashlib.sha256(text.encode()).hexdigest())\n"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
