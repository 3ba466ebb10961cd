"""Time questions with four choices: few-shot beside the class of lm-evaluation-harness, same model, a core or a GPU.

Run `OMP_NUM_THREADS=1 python -m benchmarks.few_shot --json FILE`, on a GPU with `--device cuda --questions 2000`. A
question is a passage of a page of this repository, its choices are what follows it there and at three other places, as
in HellaSwag. Both classes get the same requests; the harness's `HFLM` reads the model through `basecap.hf`, in batches
of 16. Prints questions per second of each architecture, by processor seconds on a CPU, by those of a clock on a GPU;
stops when two scores differ by more than rounding in float32.
"""

import argparse
import json
import platform
import random
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer

from basecap.data.tokenizer import Tokenizer, train_bpe
from basecap.evals import Context
from basecap.evals._few_shot.library_model import AskedModel
from basecap.evals._few_shot.scoring import Scorer
from basecap.hf import BasecapConfig, BasecapForCausalLM
from basecap.hf.export import write_tokenizer
from basecap.models import LanguageModel, model_config

ROOT = Path(__file__).parent.parent
ARCHITECTURES = ("transformer++", "mamba-2", "rwkv-7", "top1-chunk-exact", "mamba-1", "hyena")
#: Mean words of a passage, of a question alone and of one after examples; words of a choice.
PASSAGES, CHOICE = (90, 180), 9
VOCAB, HIDDEN, LENGTH = 8192, 768, 512
#: Scores in float32 may differ by this share, or by this number where they are small.
ROUNDING = 1e-5


def requests(text: str, passage: int, questions: int, generator: random.Random) -> list[Instance]:
    """Return the requests of so many questions on passages of about `passage` words, four of each."""
    words = re.findall(r"(?<=\s)[A-Za-z]+[.,]?(?=\s)", text)
    found = []
    for number in range(questions):
        length = generator.randint(passage // 2, passage * 3 // 2)
        start = generator.randrange(len(words) - length - CHOICE)
        places = [start + length, *(generator.randrange(len(words) - CHOICE) for _ in range(3))]
        context = " ".join(words[start : start + length])
        for index, place in enumerate(places):
            choice = " " + " ".join(words[place : place + CHOICE])
            found.append(
                Instance(
                    request_type="loglikelihood",
                    doc={},
                    arguments=(context, choice),
                    idx=index,
                    metadata=("questions", number, 1),
                )
            )
    return found


def timed(
    ask: Callable[[list[Instance]], Any], asked: list[Instance], device: torch.device
) -> tuple[float, list[tuple[float, bool]]]:
    """Return seconds, after some questions that do not count, and the answers, which are on the CPU."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    ask(asked[: max(8, len(asked) // 4)] if device.type == "cuda" else asked[:8])
    start = clock()
    found = ask(asked)
    return clock() - start, [(float(value), bool(best)) for value, best in found]


def compare(
    name: str, tokenizer: Tokenizer, asked: list[Instance], layers: int, device: torch.device
) -> dict[str, Any]:
    """Return the speeds of both classes for one architecture; raises AssertionError when scores differ."""
    config = model_config(name, hidden=HIDDEN, vocab=VOCAB, layers=layers, max_length=LENGTH)
    model = LanguageModel(config).initialise(0).to(device).eval()
    context = Context(data=None, device=device, autocast=torch.no_grad)
    ours = AskedModel(tokenizer, LENGTH, Scorer(model=model, context=context, tokens_per_batch=32_768))
    wrapped = BasecapForCausalLM.around(model, BasecapConfig.of(config, tokenizer.end_of_text, {}))
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(tokenizer, Path(folder))
        theirs = HFLM(wrapped, tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=16, max_length=LENGTH)
    with torch.no_grad():
        seconds, found = timed(ours.loglikelihood, asked, device)
        harness_seconds, expected = timed(lambda given: theirs.loglikelihood(given, disable_tqdm=True), asked, device)
    for (value, best), (other, other_best) in zip(found, expected, strict=True):
        assert best == other_best and abs(value - other) <= ROUNDING * max(1.0, abs(other)), (name, value, other)
    return {
        "architecture": name,
        "questions_per_s": len(asked) / 4 / seconds,
        "harness_questions_per_s": len(asked) / 4 / harness_seconds,
        "times": harness_seconds / seconds,
        "parameters": model.parameters_count(),
    }


def main() -> None:
    """Time every architecture; print a line of each, and write all with the sizes and versions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu or cuda")
    parser.add_argument("--questions", type=int, default=12, help="questions of each length")
    parser.add_argument("--layers", type=int, default=3, help="layers of a Transformer")
    parser.add_argument("--only", action="append", choices=ARCHITECTURES, help="this architecture alone; repeatable")
    options = parser.parse_args()
    path, device = options.json, options.device
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    tokenizer = train_bpe([text], VOCAB)
    rows = []
    for passage in PASSAGES:
        asked = requests(text, passage, options.questions, random.Random(0))
        lengths = [[len(tokenizer.encode(part)) for part in one.args] for one in asked]
        context, choice = (round(sum(column) / len(asked), 1) for column in zip(*lengths, strict=True))
        for name in options.only or ARCHITECTURES:
            row = compare(name, tokenizer, asked, options.layers, device)
            row |= {"context_tokens": context, "choice_tokens": choice}
            rows.append(row)
            print(
                f"{name}, {context} + {choice} tokens: {row['questions_per_s']:.2f} questions/s, "
                f"the harness {row['harness_questions_per_s']:.2f}: {row['times']:.2f} times",
                flush=True,
            )
    sizes = {"vocab": VOCAB, "hidden": HIDDEN, "layers": options.layers, "questions": options.questions}
    versions = {"torch": torch.__version__, "lm_eval": lm_eval.__version__, "transformers": transformers.__version__}
    machine = platform.processor() or platform.machine()
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else machine
    found = {"machine": machine, "threads": torch.get_num_threads(), **versions}
    path.write_text(json.dumps({**found, **sizes, "dtype": "float32", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
