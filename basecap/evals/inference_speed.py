"""How fast a model reads long prompts and writes text after them (Table 3 of arXiv 2505.18522)."""

import copy

import torch
from pydantic import Field

from basecap.data.config import Count
from basecap.data.workload import Workload
from basecap.evals._contract import Context, Decoding, Evaluation, EvaluationConfig, Measurement, Outcome, evaluation
from basecap.evals._deployed import deployed, refuse_positions
from basecap.models.decoding_speed import Load, time_decoding
from basecap.models.generate import generate
from basecap.models.language_model import LanguageModel
from basecap.records.evaluation_points import At
from basecap.system.environment import describe

#: Consecutive tokens that are timed together.
STEPS = 32
#: What prompts and new tokens are of the training length, as in the paper: 51,200 and 5,120 of 102,400.
PROMPT, NEW = 2, 20


@evaluation("inference-speed", unit="tokens/s", better="higher")
class InferenceSpeed(Evaluation[Workload]):
    """New tokens per second over reading prompts and writing, and prompt and new tokens per second of each alone.

    On a GPU compiled code reads, and tokens are written by a CUDA graph. Compilation is not counted. It is that of the
    device as it is: other runs beside it slow it down. `basecap bench generate` measures untrained models, which are as
    fast.
    """

    class Config(EvaluationConfig):
        """Options of inference-speed."""

        at: At = Field("end", description="evaluation points to run at: every, end, or a list of tokens")
        prompt: Count | None = Field(
            None, ge=1, le=2**30, description="tokens of each prompt (default: half of the training length)"
        )
        new: Count | None = Field(
            None,
            ge=STEPS,
            le=2**30,
            description=f"tokens to write after each (default: a twentieth of the training length, at least {STEPS})",
        )
        batch: Count = Field(8, ge=1, le=2**16, description="sequences that are written at once")
        rows: Count | None = Field(
            None, ge=1, description="prompts that are read at once, a divisor of batch, to save memory (default: all)"
        )
        repeats: Count = Field(5, ge=1, le=1000, description="measurements of each time; the median counts")

    config: Config
    reduced_by = "prompt, batch or repeats of inference-speed"

    def most_tokens(self, length: int) -> int:
        """Return about how many tokens are read and written, on a GPU with and without compiled code."""
        load = self._load(length)
        written = len(load.starts) * load.tokens
        return 2 * load.batch * (load.repeats + 1) * (load.prompt + written)

    def run(self, model: LanguageModel, context: Context[Workload]) -> Outcome:
        """Return the three speeds; raises ConfigError for too few positions or `rows` that do not divide `batch`."""
        load = self._checked(model)
        used = copy.copy(deployed(model, context))  # it is compiled, and the model that trains is not touched
        times, device = time_decoding(used, load), describe(context.device)["device"]
        dtype = str(used.embedding.weight.dtype).removeprefix("torch.")
        data = f"{load.batch} sequences of {load.prompt:,} + {load.new:,} tokens, {dtype}, {device}"
        seconds = times.first_token + (load.new - 1) * times.token
        speeds = {
            "generation": load.batch * load.new / seconds,
            "reading": load.batch * load.prompt / times.first_token,
            "writing": load.batch / times.token,
        }
        data += f"; {times.notes}" if times.notes else ""
        n = load.batch * load.new
        return Outcome(
            measurements=[
                Measurement(subset=subset, metric="speed", value=value, n=n, data=data)
                for subset, value in speeds.items()
            ]
        )

    def trial(self, model: LanguageModel, context: Context[Workload]) -> None:
        """Read the prompts, and write two tokens; raises ConfigError as `run` does."""
        load = self._checked(model)
        prompts = torch.zeros(load.batch, load.prompt, dtype=torch.int64, device=context.device)
        generate(deployed(model, context), prompts, 2, rows=load.rows)

    def decoding(self, model: LanguageModel) -> Decoding:
        """Return what is in memory while it reads and writes."""
        load = self._load(model.config.max_length)
        return Decoding(sequences=load.batch, length=load.length, read=(load.rows or load.batch) * load.prompt)

    def _load(self, length: int) -> Load:
        """Return what models of `length` tokens read and write."""
        c = self.config
        return Load(
            prompt=c.prompt or max(1, length // PROMPT),
            new=c.new or max(STEPS, length // NEW),
            batch=c.batch,
            rows=c.rows,
            tokens=STEPS,
            repeats=c.repeats,
        )

    def _checked(self, model: LanguageModel) -> Load:
        load = self._load(model.config.max_length)
        refuse_positions(self.declaration.name, model, load.length)
        return load
