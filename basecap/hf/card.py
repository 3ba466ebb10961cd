"""The card of an exported model, written from the records of its study and from results.json."""

from dataclasses import dataclass
from typing import Any

import yaml

from basecap.data.sources import SOURCES
from basecap.records import RunInfo
from basecap.study.config import StudyConfig

LOADING = """```python
import basecap.hf
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```"""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a card is written from.

    Attributes:
        info: the run.
        study: its study, as it was recorded.
        results: the study's entry of results.json, None where no report was written.
        fault: what `basecap check` found wrong with the architecture, None where it found nothing.
        step: of the weights, None where they are the last of the run.
        tokens: that the weights were trained on.
        model: its configuration, as JSON.
        end_of_text: the token after every document.
        plugins: names of plugin files that the model needs.
    """

    info: RunInfo
    study: StudyConfig
    results: dict[str, Any] | None
    fault: str | None
    step: int | None
    tokens: int | None
    model: dict[str, Any]
    end_of_text: str
    plugins: list[str]

    def text(self) -> str:
        """Return the card as Markdown, with the front matter that the hub reads."""
        front = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["basecap"]}
        parts = [
            f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
            f"# {self.info.name}, seed {self.info.seed}",
            self._summary(),
            "## Load it",
            "`pip install 'basecap[hf]'`, then:",
            LOADING,
            self._decoding(),
            "" if self.fault is None else f"**Its architecture {self.fault}.**",
            "## What it was trained on",
            self._training(),
            _table(["domain", "used for", "text", "licence"], self._domains()),
            "## Does it keep base capabilities?",
            self._verdict(),
            *self._losses(),
            "## Recipe",
            f"```yaml\n{yaml.safe_dump(self._recipe(), sort_keys=False)}```",
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _summary(self) -> str:
        count = "" if self.info.parameters is None else f", {self.info.parameters:,} parameters"
        return (
            f"A language model of the architecture {self.info.use}{count}, trained from scratch with basecap in the "
            f"study {self.study.title}. It is made to compare architectures, not to be used in a product."
        )

    def _decoding(self) -> str:
        words = f"Documents end with `{self.end_of_text}`, which also pads; pad prompts on the left."
        for name in self.plugins:
            words += (
                f" The model is defined in the plugin `{name}`, a copy of which is in this folder. It is never run by "
                f"itself: read it, then call `basecap.plugins.load_plugin(Path(FOLDER) / {name!r})` first."
            )
        return words

    def _training(self) -> str:
        data, info = self.study.text, self.info
        tokens = "an unknown number of tokens" if self.tokens is None else f"{self.tokens:,} tokens"
        whole = info.passes is not None and self.step is None
        passes = f", {info.passes:.3g} passes over its training text" if whole else ""
        ended = "" if info.finished else " Its training has not ended."
        if self.step is not None:
            ended += f" The weights are those of step {self.step:,}, before the end of its run."
        return (
            f"{tokens[0].upper()}{tokens[1:]}{passes}, in sequences of {data.seq_len} tokens of the tokenizer "
            f"{data.tokenizer}.{ended}"
        )

    def _domains(self) -> list[list[str]]:
        data = self.study.text
        source = SOURCES.get(data.source)
        rows = []
        for use, names in (("training", data.train), ("testing", data.ood)):
            for name in names:
                about = source.about(name) if name in source.known_domains else {}
                place = about.get("hub") or data.hub or f"source {data.source}"
                rows.append([name, use, place, about.get("licence", "not recorded")])
        return rows

    def _verdict(self) -> str:
        if self.results is None:
            return "Nothing is known: its study has no report."
        reference, name = self.results["reference"], self.info.series
        maturity = self.results.get("maturity")
        age = "" if maturity is None else _age(maturity)
        if name == reference:
            return f"It is the reference that other architectures of its study are compared with.{age}"
        row = next((row for row in self.results["comparisons"] if row["name"] == name), None)
        if row is None:
            return f"It was not compared with {reference}.{age}"
        about = "" if self.step is None else " at the end of its runs"
        gap = row["gap"]
        words = f"Verdict{about}: **{row['verdict']}**. {row['words'][:1].upper()}{row['words'][1:]}."
        if gap is not None:
            runs = "one run" if len(row["seeds"]) == 1 else f"{len(row['seeds'])} runs"
            words += (
                f" Out of domain its loss is {gap['value']:+.3f} nats per token ({gap['low']:+.3f} to "
                f"{gap['high']:+.3f}) relative to {reference} at equal loss in domain, over {runs}; the "
                f"interval holds with {100 * self.results['confidence']:.0f} % for all rows of its table together."
            )
        return words + age

    def _losses(self) -> list[str]:
        points = [] if self.results is None else self.results["points"]
        own = [point for point in points if (point["name"], point["seed"]) == (self.info.name, self.info.seed)]
        if self.step is not None:
            own = [point for point in own if point["tokens"] == self.tokens]
        if not own:
            return []
        domains = own[-1]["domains"]
        rows = [[name, _number(found["loss"]), _number(found["bits_per_byte"])] for name, found in domains.items()]
        note = f"Losses on held-out documents after {own[-1]['tokens']:,} tokens:"
        return [note, _table(["domain", "nats per token", "bits per byte"], rows)]

    def _recipe(self) -> dict[str, Any]:
        train = self.study.train.model_dump(mode="json", exclude_none=True)
        own = {key: value for key, value in (("lr", self.info.lr), ("schedule", self.info.schedule)) if value}
        machine = {"device": self.info.device, "precision": self.info.precision, "packages": self.info.packages}
        return {"model": self.model, "train": train | own, "trained with": machine}


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    cells = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


def _age(maturity: dict[str, Any]) -> str:
    unknown = maturity["state"] == "maturity unknown"
    state = "The maturity of the reference is unknown" if unknown else f"The reference is {maturity['state']}"
    return f" {state}: {maturity['words']}."
