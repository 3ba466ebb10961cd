"""Made-up text in three domains, and a study of it that trains in seconds."""

import random
from functools import cache
from pathlib import Path

WORDS = {
    "prose": ["the", "a", "river", "bridge", "stone", "walks", "over", "under", "slowly", "and", "then", "home"],
    "notes": ["the", "a", "river", "meeting", "bridge", "agenda", "stone", "item", "over", "and", "then", "next"],
    "code": ["def", "return", "if", "x", "y", "z", "(", ")", ":", "=", "+", "-", "0", "1", "2", "print"],
}


def write_text(root: Path, documents: int = 60, words: int = 60) -> Path:
    """Write one folder of text files per domain."""
    for domain in WORDS:
        (root / domain).mkdir(parents=True, exist_ok=True)
        for index, text in enumerate(_texts(domain, documents, words)):
            (root / domain / f"{index}.txt").write_text(text)
    return root


@cache
def _texts(domain: str, documents: int, words: int) -> list[str]:
    source = random.Random(domain)
    return [" ".join(source.choice(WORDS[domain]) for _ in range(words)) for _ in range(documents)]


def small_study(text: Path) -> dict:
    """Return the content of a study of two architectures; its text is written to `text`."""
    return {
        "name": "tiny",
        "data": {
            "source": "text",
            "path": str(write_text(text)),
            "tokenizer": "bytes",
            "seq_len": 32,
            "train": ["prose", "notes"],
            "ood": ["code"],
            "workers": 1,  # starting processes takes longer than reading this text
        },
        "model": {"hidden": 16, "layers": 1},
        "train": {"tokens": 2560, "batch": 8, "lr": 1e-2, "warmup": 1, "eval_every": 512},
        "architectures": ["transformer++", {"name": "window 4", "use": "transformer++", "mixer": {"window": 4}}],
    }
