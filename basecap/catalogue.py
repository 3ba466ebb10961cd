"""What there is to name: the rows of `basecap list`."""

from collections.abc import Callable
from typing import Any

import torch
import yaml

from basecap.data.sources import SOURCES
from basecap.evals._contract import EVALUATIONS
from basecap.mixers._contract import ARCHITECTURES
from basecap.models.backbones._contract import BACKBONES
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.study.config import library

#: Where sizes are compared: the published small size.
HIDDEN, VOCAB, LENGTH = 768, 32_000, 2048


def _mixers(full: bool) -> list[dict[str, Any]]:
    rows = []
    for name, architecture in ARCHITECTURES.items():
        with torch.device("meta"):
            model = LanguageModel(model_config(name, hidden=HIDDEN, vocab=VOCAB, max_length=LENGTH))
        row = {
            "name": name,
            "parameters (M)": round(model.parameters_count() / 1e6, 1),
            "state (KiB)": model.state_bytes(LENGTH) // 1024,
            "backbone": architecture.backbone,
            "summary": architecture.summary,
        }
        if full:
            row |= {
                "hidden": HIDDEN,
                "vocab": VOCAB,
                "length": LENGTH,
                "blocks": model.config.depth,
                "parameters": model.parameters_count(),
                "state_bytes": model.state_bytes(LENGTH),
                "paper": architecture.paper,
                "origin": ARCHITECTURES.origin(name),
            }
        rows.append(row)
    return rows


def _backbones(full: bool) -> list[dict[str, Any]]:
    return [{"name": name, "summary": entry.summary, "paper": entry.paper} for name, entry in BACKBONES.items()]


def _studies(full: bool) -> list[dict[str, Any]]:
    rows = []
    for name, path in library().items():
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        row = {
            "name": name,
            "architectures": len(content["architectures"]),
            "summary": content["summary"],
        }
        rows.append({**row, "path": str(path)} if full else row)
    return rows


def _evals(full: bool) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "unit": entry.declaration.unit,
            "better": entry.declaration.better,
            "summary": (entry.__doc__ or "").splitlines()[0],
        }
        for name, entry in EVALUATIONS.items()
    ]


def _domains(full: bool) -> list[dict[str, Any]]:
    return [{"source": name, "domain": domain} for name, entry in SOURCES.items() for domain in entry.known_domains]


#: Kind to rows; the argument asks for all columns (for JSON).
CATALOGUES: dict[str, Callable[[bool], list[dict[str, Any]]]] = {
    "mixers": _mixers,
    "backbones": _backbones,
    "studies": _studies,
    "evals": _evals,
    "domains": _domains,
}
