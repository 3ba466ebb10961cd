"""Downstream scores: what the model computes, and what tasks of lm-evaluation-harness make of it."""

import json
import math
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from basecap.data.tokenizer import Tokenizer, byte_tokenizer, train_bpe
from basecap.errors import ConfigError, DataError
from basecap.evals import build_evaluation
from basecap.evals._few_shot.scoring import Scorer
from basecap.models.config import model_config
from basecap.models.generate import generate
from basecap.models.language_model import LanguageModel
from tests.evals._context import LENGTH
from tests.small_study import WORDS

PAIRS = [("the river ", "walks"), ("a stone", " home"), ("a stone", " over the bridge"), ("o", "x"), ("ab", "cd")]


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request) -> Tokenizer:
    return byte_tokenizer() if request.param == "bytes" else train_bpe([" ".join(WORDS["prose"])] * 20, 300)


def scorer_of(context, model, tokens_per_batch=256):
    return Scorer(model=model, context=context, tokens_per_batch=tokens_per_batch)


def other(tokenizer: Tokenizer, name: str = "transformer++") -> LanguageModel:
    """Return a model whose most probable tokens are not all the same."""
    config = model_config(name, hidden=16, vocab=tokenizer.vocab_size, layers=1, max_length=LENGTH)
    found = LanguageModel(config).initialise(1)
    with torch.no_grad():
        found.embedding.weight.mul_(40)
    return found


def plain(model: LanguageModel, before: list[int], predicted: list[int]) -> tuple[float, bool]:
    """Return the log-probability in float64, one token after the other, and whether each is the most probable."""
    exact, total, greedy = LanguageModel(model.config).double(), 0.0, True
    exact.load_state_dict(model.state_dict())
    for at, token in enumerate(predicted):
        with torch.no_grad():
            logits = exact.logits(torch.tensor([[*before, *predicted[:at]]]))[0, -1]
        total += logits.log_softmax(-1)[token].item()
        greedy &= logits.argmax().item() == token
    return total, greedy


@pytest.mark.parametrize("name", ["transformer++", "mamba-2"])
def test_scores_are_sums_over_tokens_in_any_batch(context, tokenizer, name):
    asked = other(tokenizer, name)
    pairs = [tuple(map(tokenizer.encode, pair)) for pair in PAIRS]
    with torch.no_grad():
        likely = generate(asked, torch.tensor([pairs[0][0]]), 3)[0].tolist()
        pairs += [(pairs[0][0], likely), (pairs[0][0], [*likely[:-1], 0]), (pairs[0][0], likely[:1]), ([5], [])]
        alone, together = (scorer_of(context, asked, size).scores(pairs) for size in (1, 10_000))
    expected = [plain(asked, *pair) for pair in pairs]
    for found in (alone, together):
        assert [one for one, _ in found] == pytest.approx([one for one, _ in expected], abs=2e-5)
        assert [best for _, best in found] == [best for _, best in expected]
    assert expected[len(PAIRS)][1] and not expected[len(PAIRS) + 1][1] and together[-1] == (0.0, True)
    assert [one for one, _ in alone] == pytest.approx([one for one, _ in together], abs=1e-5)


def test_answers_that_differ_in_the_last_token_are_read_once(context, model, monkeypatch):
    rows = []
    hidden = LanguageModel.hidden
    monkeypatch.setattr(LanguageModel, "hidden", lambda self, tokens: rows.append(len(tokens)) or hidden(self, tokens))
    with torch.no_grad():
        scorer_of(context, model, 10_000).scores([([1, 2, 3], [letter]) for letter in range(4)])
    assert rows == [1]


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("transformer++ absolute", "padded"),
        ("top1-element", "padded"),
        ("mamba-2", "powers of two"),
        ("mamba-2", "one"),
        ("mamba-2", "all, and steps"),
    ],
)
def test_choices_share_the_state_of_their_context(context, name, pieces, monkeypatch):
    if pieces == "one":
        monkeypatch.setattr("basecap.mixers._cache.PADDING_ON_CPU", 1000)  # passes cost more than tokens
    elif pieces == "all, and steps":
        monkeypatch.setattr(LanguageModel, "continues", False)
    asked, generator = other(byte_tokenizer(), name), np.random.default_rng(0)
    questions = [generator.integers(256, size=length).tolist() for length in (9, 14, 9, LENGTH - 4)]
    pairs = [(before, generator.integers(256, size=1 + at).tolist()) for before in questions for at in (1, 0, 2, 4)]
    likely = generate(asked, torch.tensor([questions[0]]), 3)[0].tolist()
    pairs.append((questions[0], likely))
    read, inner = [], LanguageModel._read

    def watched(self, tokens: torch.Tensor, last_B: torch.Tensor | None, *rest, **options):
        read.append(tokens.numel() if last_B is None else int(last_B.sum()) + len(last_B))
        return inner(self, tokens, last_B, *rest, **options)

    monkeypatch.setattr(LanguageModel, "_read", watched)
    for size in (1, 10_000):
        with torch.no_grad():
            found = scorer_of(context, asked, size).scores(pairs)
        expected = [plain(asked, *pair) for pair in pairs]
        assert [one for one, _ in found] == pytest.approx([one for one, _ in expected], abs=2e-5)
        assert [best for _, best in found] == [best for _, best in expected] and found[-1][1]
    lengths = [len(question) - 1 for question in questions]  # the last token is read with each answer
    kept = {"one": [8, 8, 8, 8], "powers of two": [8, 12, 8, 40]}.get(pieces, lengths)
    assert lengths == [8, 13, 8, 43] and sum(read) == sum(lengths) + sum(kept)  # alone, and together
    assert len(read) == {"one": 4 + 1, "all, and steps": 4 + 3}.get(pieces, len(read))


def test_continuations_are_those_of_each_prompt_alone(context, model):
    prompts = [[1, 2, 3], [4], [7, 8, 9], [3, 2, 1], [5, 6]]
    found = scorer_of(context, other(byte_tokenizer()), 20).continuations(prompts, 6, lambda tokens: False)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == generate(other(byte_tokenizer()), torch.tensor([prompt]), 6)[0].tolist()
    ended = scorer_of(context, model, 1).continuations([[1, 2]], 6, lambda tokens: len(tokens) >= 2)
    assert [len(tokens) for tokens in ended] == [2]


def test_continuations_are_in_the_precision_of_training(context, model, monkeypatch):
    def written(model, prompts, tokens, ends):
        dtypes.append(model.embedding.weight.dtype)
        return [[1] * tokens] * len(prompts)

    low, dtypes = replace(context, autocast=partial(torch.autocast, "cpu", torch.bfloat16)), []
    monkeypatch.setattr("basecap.evals._few_shot.scoring.generate_each", written)
    for one in (low, context):
        assert scorer_of(one, model).continuations([[1, 2], [3]], 2, lambda tokens: False) == [[1, 1]] * 2
    assert dtypes == [torch.bfloat16, torch.float32] and model.embedding.weight.dtype == torch.float32


def test_it_says_how_to_install_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for name in [name for name in sys.modules if name.startswith(("lm_eval.", "basecap.evals._few_shot.library"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("basecap.evals._few_shot.library", raising=False)
    monkeypatch.setattr("basecap.evals.few_shot.find_spec", lambda name: None)
    evaluation = build_evaluation({"few-shot": {"tasks": ["piqa"]}})
    assert evaluation.missing() == (
        "few-shot needs lm-evaluation-harness; pip install 'basecap[eval]', or remove few-shot.",
    )
    with pytest.raises(ConfigError, match=r"pip install 'basecap\[eval\]'"):
        evaluation.refuse_missing()
    with pytest.raises(ConfigError) as refused:
        build_evaluation("few-shot")
    assert str(refused.value) == (
        "evaluation 'few-shot' needs the option 'tasks'; add it, as in few-shot: {tasks: [...]}, or --add 'few-shot: "
        "{tasks: [...]}' on the command line."
    )


@pytest.fixture
def library(monkeypatch, tmp_path):
    pytest.importorskip("lm_eval")
    from basecap.evals._few_shot import library

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return library


def write_task(place: Path, name: str, rows: list[dict], **keys) -> None:
    """Write a task file and its data, in which every row is a test document."""
    data = place / "data" / f"{name}.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    (place / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **source, **keys}))


def metrics(*names: str) -> list[dict]:
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]


def write_choices(place: Path, name: str = "choices", count: int = 7, **keys) -> list[dict]:
    words = np.random.default_rng(0)
    rows = [
        {
            "question": " ".join(words.choice(WORDS["prose"], 2)),
            "options": [" ".join(words.choice(WORDS["prose"], size)) for size in (1, 2, 1)],
            "answer": int(words.integers(3)),
        }
        for _ in range(count)
    ]
    fields = {"doc_to_text": "{{question}}", "doc_to_choice": "options", "doc_to_target": "answer"}
    write_task(
        place, name, rows, output_type="multiple_choice", metric_list=metrics("acc", "acc_norm"), **fields, **keys
    )
    return rows


def request(*texts, document: int = 0) -> SimpleNamespace:
    """Return what a model is asked about a document."""
    return SimpleNamespace(args=texts, doc_id=document)


def few_shot(place: Path, *tasks: str, **options):
    return build_evaluation({"few-shot": {"tasks": list(tasks), "path": str(place), **options}})


def test_choices_are_scored_as_by_hand_by_any_number_of_processes(library, context, model, tmp_path):
    place, tokenizer = tmp_path / "tasks", context.data.tokenizer
    rows = write_choices(place)
    right, normalised = [], []
    for row in rows:
        values = [
            plain(model, tokenizer.encode(row["question"]), tokenizer.encode(f" {option}"))[0]
            for option in row["options"]
        ]
        lengths = [len(option) for option in row["options"]]
        right.append(np.argmax(values) == row["answer"])
        normalised.append(np.argmax(np.divide(values, lengths)) == row["answer"])
    evaluation = few_shot(place, "choices")
    assert evaluation.tokens_read(context.data, LENGTH) is None
    evaluation.check(context.data, LENGTH)
    answers = [f"{row['question']} {option}" for row in rows for option in row["options"]]
    read = {tuple(tokenizer.encode(answer)[:-1]) for answer in answers}  # the last token is only predicted
    assert evaluation.tokens_read(context.data, LENGTH) == sum(map(len, read))
    with torch.no_grad():
        whole = evaluation.run(model, context)
        parts = [evaluation.run(model, replace(context, rank=rank, world=9)) for rank in range(9)]
        first = few_shot(place, "choices", limit=3).run(model, context).measurements[0]
    assert [(one.subset, one.metric, one.n) for one in whole.measurements] == [
        ("choices", "acc", 7),
        ("choices", "acc_norm", 7),
    ]
    for one, hits in zip(whole.measurements, (right, normalised), strict=True):
        assert one.value == pytest.approx(np.mean(hits))
        assert one.stderr == pytest.approx(np.std(hits, ddof=1) / math.sqrt(7))
    assert whole.measurements == evaluation.join(parts).measurements and not parts[0].measurements
    assert (first.value, first.n) == (pytest.approx(np.mean(right[:3])), 3)


@pytest.mark.parametrize(("tokens", "rows"), [(2 * LENGTH, 2), (32_768, 7 * 3)])
def test_a_trial_reads_the_largest_batch(library, context, model, tmp_path, monkeypatch, tokens, rows):
    write_choices(tmp_path)
    write_choices(tmp_path, "fewer", 2)
    evaluation = few_shot(tmp_path, "choices", "fewer", tokens_per_batch=tokens)
    shapes, hidden = [], LanguageModel.hidden
    monkeypatch.setattr(LanguageModel, "hidden", lambda self, x: shapes.append(tuple(x.shape)) or hidden(self, x))
    evaluation.check(context.data, LENGTH)
    with torch.no_grad():
        evaluation.trial(model, context)
    assert shapes == [(rows, LENGTH)]


def test_a_name_that_no_task_has_is_refused_before_anything_is_loaded(library, tmp_path, monkeypatch):
    def load(*given: object):
        raise AssertionError

    monkeypatch.setattr(library, "TaskManager", load)
    write_choices(tmp_path, tag="easy")
    for names, path, words in [
        (("choices", "choice"), tmp_path, "has no task 'choice': did you mean 'choices'?"),
        (("piqa", "arc_eazy"), None, "few-shot: unknown task 'arc_eazy': did you mean 'arc_easy'?"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(words)):
            build_evaluation({"few-shot": {"tasks": names, "path": path and str(path)}}).check_options()
    build_evaluation({"few-shot": {"tasks": ["mmlu", "arc_easy", "ai2_arc"]}}).check_options()
    few_shot(tmp_path, "choices", "easy").check_options()


def test_texts_have_perplexities_with_errors_over_documents(library, context, model, tmp_path):
    pages = [" ".join(WORDS["prose"][: 3 + index] * (1 + index)) for index in range(5)]
    keys = {"doc_to_text": "", "doc_to_target": "{{page}}", "output_type": "loglikelihood_rolling"}
    names = [{"metric": name} for name in ("word_perplexity", "bits_per_byte")]
    write_task(tmp_path, "pages", [{"page": page} for page in pages], metric_list=names, **keys)
    with torch.no_grad():
        words, bits = few_shot(tmp_path, "pages").run(model, context).measurements
    end, sums = context.data.tokenizer.end_of_text, []
    for page in pages:  # windows that predict each token once: the last has as much context as fits
        tokens = [end, *context.data.tokenizer.encode(page)]
        count, total, done = len(tokens) - 1, 0.0, 0
        while done < count:
            until = min(count, done + LENGTH)
            total += plain(model, tokens[max(0, until - LENGTH) : done + 1], tokens[done + 1 : until + 1])[0]
            done = until
        sums.append(total)
    counts = [len(page.split()) for page in pages]
    assert len(context.data.tokenizer.encode(pages[-1])) > 2 * LENGTH
    assert math.log(words.value) == pytest.approx(-sum(sums) / sum(counts), abs=1e-4)
    assert bits.value == pytest.approx(-sum(sums) / sum(map(len, pages)) / math.log(2), abs=1e-4)
    residuals = [value - sum(sums) / sum(counts) * count for value, count in zip(sums, counts, strict=True)]
    delta = math.sqrt(len(pages)) * np.std(residuals, ddof=1) / sum(counts) * words.value
    assert (words.metric, words.n) == ("word_perplexity", 5) and words.stderr == pytest.approx(delta, rel=0.5)


@pytest.mark.parametrize("documents", [150, 1500])
def test_perplexities_have_errors_of_their_own_and_not_those_of_the_mean(library, documents):
    from lm_eval.api.registry import get_aggregation

    values = np.random.default_rng(0).normal(-3, 0.5, documents).tolist()
    mean, perplexity = (library._stderr(values, get_aggregation(name)) for name in ("mean", "perplexity"))
    assert mean == pytest.approx(np.std(values, ddof=1) / math.sqrt(documents))
    assert perplexity == pytest.approx(math.exp(-np.mean(values)) * mean, rel=0.15)  # to first order
    assert library._stderr(values[:1], get_aggregation("perplexity")) is None


def test_answers_are_greedy_and_end_at_a_stop_string(library, context, tmp_path, caplog):
    asked, tokenizer = other(byte_tokenizer()), byte_tokenizer()
    prompt = "the river "
    text = tokenizer.decode(generate(asked, torch.tensor([tokenizer.encode(prompt)]), 12)[0].tolist())
    stop = text[5]
    cut = text.split(stop)[0]
    rows = [{"text": prompt, "value": cut}, {"text": prompt * 5, "value": cut + "x"}]
    keys = {"doc_to_text": "{{text}}", "doc_to_target": "{{value}}", "output_type": "generate_until"}
    options = {"generation_kwargs": {"until": [stop], "max_gen_toks": 12}, "metric_list": metrics("exact_match")}
    write_task(tmp_path, "answers", rows, **keys, **options)
    evaluation = few_shot(tmp_path, "answers")
    with torch.no_grad():
        found = evaluation.run(asked, context).measurements
    evaluation.check(context.data, LENGTH)
    assert "1 of the first 2 prompts do not fit the 48 tokens that models read, and lose" in caplog.text
    assert [(one.metric, one.value) for one in found] == [("exact_match", 0.5), (library.CUT, 0.5)]


def test_texts_are_split_into_tokens_as_a_whole(library, context, tokenizer):
    class Pairs:
        def scores(self, pairs):
            self.pairs = pairs
            return [(0.0, False)] * len(pairs)

    seen, encode = Pairs(), tokenizer.encode
    model = library.AskedModel(tokenizer, 8, seen)
    texts = [("the ", "river"), ("", " over"), ("ri", "ver"), ("b" * 20, "c"), (" ", "over")]
    model.loglikelihood([request(*text, document=at) for at, text in enumerate(texts)])
    spaced, first, joined, long, spaces = seen.pairs
    assert spaced == (encode("the"), encode(" river"))
    assert first == spaces == ([tokenizer.end_of_text], encode(" over"))
    assert joined[0] == encode("ri") and joined[1] and long == (encode("b" * 20)[-8:], encode("c"))
    assert model.cut == {0: [False], 1: [False], 2: [False], 3: [True], 4: [False]}


def test_an_answer_may_end_one_token_after_what_the_model_reads(library, context):
    model = library.AskedModel(byte_tokenizer(), LENGTH)
    model.generate_until([request("river", {"until": ["."], "max_gen_toks": LENGTH - 4})])
    assert model.cut == {0: [False]} and model.read == LENGTH


@pytest.mark.parametrize(
    ("error", "of_hub"),
    [
        (ConnectionError("no route"), True),
        (ValueError("Couldn't find cache for piqa for config 'default'"), True),
        (FileNotFoundError("Dataset 'a/b' doesn't exist on the Hub or cannot be accessed."), True),
        (FileNotFoundError("Unable to find '/data/lost.jsonl'"), False),
        (ValueError("Sample larger than population or is negative"), False),
        (KeyError("question"), False),
    ],
)
def test_the_hub_is_advised_where_it_would_help(library, error, of_hub):
    with pytest.raises(DataError, match="connect to" if of_hub else "correct its task file"), library.named("task"):
        raise error


def test_groups_have_the_score_of_all_their_documents(library, context, model, tmp_path):
    write_choices(tmp_path, "few", 3)
    write_choices(tmp_path, "many", 6)
    score = {"aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}]}
    (tmp_path / "all.yaml").write_text(yaml.safe_dump({"group": "all", "task": ["few", "many"], **score}))
    with torch.no_grad():
        (whole,) = few_shot(tmp_path, "all").run(model, context).measurements
        parts = few_shot(tmp_path, "few", "many").run(model, context).measurements
    few, many = (one for one in parts if one.metric == "acc")
    assert (whole.subset, whole.n) == ("all", 9) and whole.value == pytest.approx((few.value + 2 * many.value) / 3)
    variance = (3 * 2 * few.stderr**2 + 6 * 5 * many.stderr**2) / (9 - 2)
    assert whole.stderr == pytest.approx(math.sqrt(variance / 9)) and whole.stderr > 0
    with pytest.raises(ConfigError, match="task 'few' is in two of the tasks"):
        _ = few_shot(tmp_path, "all", "few")._tasks


def test_scores_are_those_of_the_library_itself(library, context, model, tmp_path):
    from lm_eval.evaluator import evaluate

    write_choices(tmp_path, "few", 3, fewshot_split="test")
    write_choices(tmp_path, "many", 6, fewshot_split="test")
    score = {
        "aggregate_metric_list": [{"metric": name, "weight_by_size": name == "acc"} for name in ("acc", "acc_norm")]
    }
    (tmp_path / "all.yaml").write_text(yaml.safe_dump({"group": "all", "task": ["few", "many"], **score}))
    ours = few_shot(tmp_path, "all", shots=1, tokens_per_batch=64)
    with torch.no_grad():
        found = {one.metric: one for one in ours.run(model, context).measurements}
    loaded = library._manager(str(tmp_path)).load(["all"])
    for task in loaded["tasks"].values():
        task.set_config(key="num_fewshot", value=1)
        task.set_fewshot_seed(1234)
    asked = library.AskedModel(context.data.tokenizer, LENGTH, scorer_of(context, model))
    with torch.no_grad():
        expected = evaluate(asked, loaded)["results"]["all"]
    for name in ("acc", "acc_norm"):
        assert found[name].value == pytest.approx(expected[f"{name},none"])
        assert found[name].stderr == pytest.approx(expected[f"{name}_stderr,none"])


def test_prompts_show_as_many_examples_as_asked_for(library, tmp_path):
    rows = write_choices(tmp_path, fewshot_split="test")
    tasks = few_shot(tmp_path, "choices", shots={"choices": 2})._tasks
    (prompt, _), again = (
        tasks._ask("choices", library.AskedModel(byte_tokenizer(), 400), None)[0]["arguments"][0] for _ in range(2)
    )
    assert prompt == again[0] and prompt.count("\n\n") == 2 and prompt.endswith(rows[0]["question"])


def test_what_cannot_be_asked_is_refused_before_training(library, context, tmp_path):
    write_choices(tmp_path)
    keys = {"doc_to_text": "{{text}}", "doc_to_target": "{{value}}"}
    long = [{"text": "stone " * 20, "value": "a"}, {"text": "stone " * 30, "value": "b"}, {"text": "a", "value": "b"}]
    write_task(tmp_path, "long", long, output_type="loglikelihood", metric_list=metrics("acc"), **keys)
    answers = {"output_type": "generate_until", "metric_list": metrics("exact_match"), **keys}
    write_task(tmp_path, "talks", long[2:], generation_kwargs={"until": ["."], "max_gen_toks": LENGTH + 1}, **answers)
    write_task(tmp_path, "draws", long[2:], generation_kwargs={"do_sample": True, "temperature": 1.0}, **answers)
    write_task(tmp_path, "lost", long, **answers)
    (tmp_path / "data" / "lost.jsonl").unlink()
    for tasks, options, error, words in [
        (("choice",), {}, ConfigError, "has no task 'choice': did you mean 'choices'"),
        (("choices",), {"shots": {"other": 1}}, ConfigError, "shots names 'other', which is not among tasks"),
        (("choices",), {"path": str(tmp_path / "none")}, ConfigError, "is not a directory"),
        (("lost",), {}, DataError, r"'lost' cannot be asked \(.*lost\.jsonl.*\); correct its task file or its data"),
        (("choices",), {"shots": 40}, DataError, "'choices' has 7 examples, fewer than its 40 shots; lower shots"),
        (("long",), {}, DataError, f"task 'long': 2 of the first 3 prompts do not fit the {LENGTH} tokens"),
        (("talks",), {}, DataError, f"task 'talks': an answer of up to {LENGTH + 1} tokens .* raise data.seq_len"),
        (("draws",), {}, ConfigError, "task 'draws': it samples its answers"),
    ]:
        with pytest.raises(error, match=words):
            build_evaluation({"few-shot": {"tasks": list(tasks), "path": str(tmp_path), **options}}).check(
                context.data, LENGTH
            )
