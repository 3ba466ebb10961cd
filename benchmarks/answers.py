"""Time evaluations that let models write answers: passkey, and the questions of few-shot, with untrained models.

Run `python -m benchmarks.answers OUT.json --study bc-table-3 --passkey 102400 --samples 50`, or `--study bc-table-1
--questions 64 --only transformer++` for prompts of 2,000 tokens after which 48 tokens are written, as SWDE, SQuAD and
FDA have them. An untrained model takes the time of a trained one that finds nothing: no answer ends early. Each
evaluation runs once with few prompts, which compiles and is not counted. `--dtype` is that in which answers are
written, by default that of training: bfloat16 on a GPU. OUT.json is written after each architecture.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from basecap.bench.contenders import Contenders, of_study
from basecap.data.tokenizer import Tokenizer, byte_tokenizer, train_bpe
from basecap.evals import Context
from basecap.evals._few_shot.scoring import Scorer
from basecap.evals.passkey import PasskeyRetrieval
from basecap.models import LanguageModel
from basecap.system.environment import choose_device, describe

ROOT = Path(__file__).parent.parent
#: Entries of the tokenizer, of which a model may have more.
VOCAB = 8192
#: Tokens of a question's prompt and of its answer.
PROMPT, NEW = 2000, 48
#: Prompts of the run that is not counted.
FEW = 2


@dataclass(frozen=True)
class Text:
    """What passkey reads of `basecap.data.PreparedData`."""

    tokenizer: Tokenizer


def tokenizer_for(models: Contenders) -> Tokenizer:
    """Return one of the documentation, or bytes for models that have no entries for it."""
    if min(config.vocab for config in models.values()) < VOCAB:
        return byte_tokenizer()
    return train_bpe([page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))], VOCAB)


def timed(run: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Return the seconds of a run, and the most GiB of a GPU that it takes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return {"seconds": time.perf_counter() - start, "gib": torch.cuda.max_memory_allocated() / 2**30}
    return {"seconds": time.perf_counter() - start}


def passkey(model: LanguageModel, context: Context, options: argparse.Namespace) -> dict[str, Any]:
    """Return the time of so many samples at one length; that of making them is apart."""
    given: dict[str, Any] = {"lengths": (options.passkey,), "batch": options.batch}
    few, whole = (PasskeyRetrieval(PasskeyRetrieval.Config(samples=n, **given)) for n in (FEW, options.samples))
    few.run(model, context)
    start = time.perf_counter()
    whole._samples(context.data.tokenizer, model.config.max_length)
    made = time.perf_counter() - start
    row = timed(partial(whole.run, model, context), context.device)
    return row | {"prompt_seconds": made, "length": options.passkey, "samples": options.samples, "batch": options.batch}


def questions(model: LanguageModel, context: Context, options: argparse.Namespace) -> dict[str, Any]:
    """Return the time of so many prompts of random tokens and their answers."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, model.config.vocab, (options.questions, PROMPT), generator=generator).tolist()
    scorer = Scorer(model=model, context=context, tokens_per_batch=options.tokens_per_batch)
    scorer.continuations(prompts[:FEW], NEW, _never)
    row = timed(partial(scorer.continuations, prompts, NEW, _never), context.device)
    return row | {"questions": options.questions, "tokens_per_batch": options.tokens_per_batch}


def _never(tokens: list[int]) -> bool:
    return False


def main() -> None:
    """Time every architecture of a study; print a line of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--study", required=True)
    parser.add_argument("--scale", help="size of the study (default: as basecap run takes it)")
    parser.add_argument("--only", action="append", default=[], help="this architecture, and the reference; repeatable")
    parser.add_argument("--passkey", type=int, help="tokens of a prompt of passkey and its answer")
    parser.add_argument("--samples", type=int, default=50, help="prompts of passkey")
    parser.add_argument("--batch", type=int, default=8, help="answers of passkey that are written at once")
    parser.add_argument("--questions", type=int, help="questions of few-shot")
    parser.add_argument("--tokens-per-batch", type=int, default=32_768, help="of few-shot")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of answers (default: as training has it)")
    options = parser.parse_args()
    device = choose_device(None)
    dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    models = of_study(options.study, options.only, scale=options.scale, length=options.passkey)
    precision = partial(torch.autocast, device.type, torch.bfloat16) if dtype == "bfloat16" else nullcontext
    context = Context[Any](data=Text(tokenizer_for(models)), device=device, autocast=precision)
    rows: list[dict[str, Any]] = []
    for name, config in models.items():
        model = LanguageModel(config).to(device).initialise(0).eval()
        row: dict[str, Any] = {"architecture": name, "parameters": model.parameters_count(), "dtype": dtype}
        with torch.no_grad():
            if options.passkey is not None:
                rows.append(row | passkey(model, context, options))
            if options.questions is not None:
                rows.append(row | questions(model, context, options))
        print(rows[-1], flush=True)
        options.out.write_text(json.dumps(describe(device) | {"rows": rows}, indent=1) + "\n")
        del model


if __name__ == "__main__":
    main()
