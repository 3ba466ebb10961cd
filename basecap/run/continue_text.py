"""Text from a trained run of a study."""

from pathlib import Path

from basecap.run.trained import load_trained, refuse_bytes


def continue_text(
    run: Path,
    prompt: str,
    tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    seed: int,
    device: str | None,
) -> str:
    """Return `prompt` and its continuation by the model in `run` (DIR/runs/NAME-sSEED).

    Raises:
        ConfigError, CheckpointError: as `load_trained`, and where `prompt` is not text or the model has no tokenizer.
    """
    refuse_bytes(prompt)
    trained = load_trained(run, device=device)
    return trained.generate(prompt, tokens, temperature=temperature, top_k=top_k, seed=seed)
