"""Text from a trained run of a study."""

import json
from collections.abc import Sequence
from pathlib import Path

from basecap.errors import ConfigError
from basecap.run.trained import Continued, load_trained, refuse_bytes


def continue_text(
    run: Path,
    prompts: Sequence[str],
    tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    seed: int,
    device: str | None,
    stops: Sequence[str] = (),
) -> list[Continued]:
    """Return the continuation of each prompt by the model in `run` (DIR/runs/NAME-sSEED), as if it were alone.

    Raises:
        ConfigError, CheckpointError: as `load_trained`, and where a prompt is not text, a stop string is empty or the
            model has no tokenizer.
    """
    for prompt in prompts:
        refuse_bytes(prompt)
    trained = load_trained(run, device=device)
    return trained.generate_each(prompts, tokens, temperature=temperature, top_k=top_k, seed=seed, stops=stops)


def read_prompt_file(path: Path) -> list[str]:
    """Return the prompts of a file: one per line; in a file *.jsonl a line is a JSON string or has the key "prompt".

    Raises:
        ConfigError: the file cannot be read, is not text, has no prompt, or a line of a *.jsonl is something else.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); give a file of prompts.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8; convert it.") from error
    numbered = [(number, line.rstrip("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"{path} has no prompt; write one on each line.")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_prompt_of(line, f"{path}:{number}") for number, line in numbered]


def _prompt_of(line: str, place: str) -> str:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    prompt = found.get("prompt") if isinstance(found, dict) else found
    if not isinstance(prompt, str):
        raise ConfigError(f'{place} is no prompt; write a JSON string, or an object such as {{"prompt": "text"}}.')
    return prompt
