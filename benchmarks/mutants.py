"""Do the tests notice deliberate faults? Usage: python -m benchmarks.mutants [WORD ...]: mutants whose words hold one.

Each mutant changes one piece of the code in a temporary copy of the repository and runs the tests that should fail.
The unchanged copy must pass the same tests first. Prints a Markdown table; the exit code is 1 if a mutant survived.
Processes are forked after PyTorch was imported, which otherwise takes longer than most of the tests.
"""

import compileall
import contextlib
import multiprocessing
import os
import py_compile
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parent.parent
#: Seconds after which a mutant that keeps its tests from ending counts as killed.
LIMIT = 300.0


class Mutant(NamedTuple):
    """A fault: what it is, the file, the text that is replaced (it must occur once), and the tests to run."""

    what: str
    file: str
    old: str
    new: str
    tests: str


CONFIG, LOOP, CHECKPOINT = "train/config.py", "train/loop.py", "train/checkpoint.py"
PLAN, MERGE, SWEEP = "study/plan.py", "study/merge.py", "study/sweep.py"
T_LOOP, T_CHECKPOINT = "train/test_loop.py::test_", "train/test_checkpoint.py::test_"
T_SIGNAL = "train/test_interruption.py::test_"
T_MERGE, T_SWEEP = "study/test_merge.py::test_", "study/test_sweep.py::test_"

MUTANTS = (
    Mutant(
        "no checkpoint at the last step",
        LOOP,
        "if step.save or self.timetable.saves(done):",
        "if step.save or (self.timetable.saves(done) and done < self.timetable.steps):",
        T_SIGNAL + "a_trained_run_is_not_trained_again_because_its_evaluation_was_interrupted",
    ),
    Mutant(
        "no evaluation at the last step",
        CONFIG,
        "return done == self.steps or (done > 0 and",
        "return (done > 0 and",
        T_LOOP + "evaluations_follow_the_tokens",
    ),
    Mutant(
        "loss: mean over micro-batches, not over targets",
        LOOP,
        "* (count / share).float()",
        "* (1 / len(counts))",
        T_LOOP + "loss_and_gradients_are_those_of_the_mean_over_all_targets",
    ),
    Mutant(
        "loss: targets of this process alone",
        LOOP,
        "share = group.mean(torch.full((), sum(counts), dtype=torch.float64, device=device))",
        "share = torch.full((), sum(counts), dtype=torch.float64, device=device)",
        "train/test_distributed.py::test_two_processes_with_uneven_rows_and_an_interruption_train_as_one",
    ),
    Mutant(
        "micro-batches of short sequences are small",
        LOOP,
        "self.micro_batch * len(batch) // share",
        "self.micro_batch",
        T_LOOP + "micro_batches_of_short_sequences_hold_as_many_tokens",
    ),
    Mutant(
        "a resumed run skips a step",
        CHECKPOINT,
        "return _read_state(path)[0]\n",
        "return _read_state(path)[0] + 1\n",
        T_LOOP + "resume_is_exact_to_the_bit",
    ),
    Mutant(
        "a resumed run keeps records after its checkpoint",
        LOOP,
        "group.run_on_leader(lambda: self.records.rewind(done))",
        "group.run_on_leader(lambda: None)",
        T_LOOP + "resume_is_exact_to_the_bit",
    ),
    Mutant(
        "a resumed run forgets Adam's moments",
        CHECKPOINT,
        'if key.rpartition("/")[0] == name',
        'if key.rpartition("/")[0] == name and not key.endswith("exp_avg")',
        T_LOOP + "resume_is_exact_to_the_bit",
    ),
    Mutant(
        "evaluations run in training mode",
        LOOP,
        "self.model.eval()\n        try:",
        "self.model.train()\n        try:",
        T_LOOP + "evaluations_see_no_dropout_and_training_does",
    ),
    Mutant(
        "checksums are not compared",
        CHECKPOINT,
        "if file_digest(path / name) != expected.get(name):",
        "if file_digest(path / name) is None:",
        T_CHECKPOINT + "a_damaged_checkpoint_gives_way_to_the_one_before_and_that_is_said",
    ),
    Mutant(
        "a run resumes from its oldest checkpoint",
        CHECKPOINT,
        "for _, path in reversed(_steps(directory)):",
        "for _, path in _steps(directory):",
        T_CHECKPOINT + "a_damaged_checkpoint_gives_way_to_the_one_before_and_that_is_said",
    ),
    Mutant(
        "one checkpoint is kept",
        CHECKPOINT,
        "KEPT = 2\n",
        "KEPT = 1\n",
        T_CHECKPOINT + "a_run_resumes_from_the_checkpoint_before_a_damaged_one_to_the_bit",
    ),
    Mutant(
        "checkpoints are not written through to the disk",
        CHECKPOINT,
        "fsync_files(partial)  #",
        "pass  #",
        T_CHECKPOINT + "no_checkpoint_goes_before_the_disk_holds_the_next_and_what_stands_behind_it",
    ),
    Mutant(
        "a checkpoint is due before its time",
        LOOP,
        "self._saved_time >= CHECKPOINT_SECONDS",
        "self._saved_time <= CHECKPOINT_SECONDS",
        T_SIGNAL + "a_checkpoint_is_due_after_some_time_unless_the_study_says_how_often",
    ),
    Mutant(
        "a forwarded signal counts as a second one",
        "train/interruption.py",
        "SECOND_SIGNAL_AFTER = 1.0",
        "SECOND_SIGNAL_AFTER = 0.0",
        T_SIGNAL + "the_same_request_may_come_twice_and_one_that_came_before_ends_an_evaluation",
    ),
    Mutant(
        "a second signal does nothing",
        "train/interruption.py",
        "        os.kill(os.getpid(), number)\n",
        "",
        T_SIGNAL + "a_second_signal_ends_the_process_at_once",
    ),
    Mutant(
        "a signal within a step is forgotten",
        LOOP,
        "torch.tensor([requested() is not None,",
        "torch.tensor([False,",
        T_SIGNAL + "a_signal_within_a_step_leaves_a_checkpoint_of_that_step",
    ),
    Mutant(
        "warm-up starts from a rate of 0",
        "train/schedule.py",
        "peak * (step + 1) / warmup",
        "peak * step / warmup",
        "train/test_schedule.py::test_rate_rises_to_the_peak_and_falls_towards_the_end",
    ),
    Mutant(
        "weight decay for all parameters",
        "train/optim.py",
        "config.weight_decay if decay else 0.0",
        "config.weight_decay",
        "train/test_schedule.py::test_groups_follow_the_recipes",
    ),
    Mutant(
        "the average keeps a share of the initial weights",
        "train/average.py",
        "(1 - 1 / step) ** self._power",
        "(1 - 1 / (step + 1)) ** self._power",
        "train/test_average.py::test_weights_count_by_a_power_of_their_step_and_the_first_ones_not_at_all",
    ),
    Mutant(
        "a run records the ops of the run before",
        "study/training_job.py",
        "    IMPLEMENTATIONS.clear()\n",
        "",
        "study/test_execute.py::test_a_run_records_its_own_ops_alone",
    ),
    Mutant(
        "a run ends only above train.stop_at",
        "study/training_job.py",
        "sum(found) / len(found) >= run.train.stop_at",
        "sum(found) / len(found) > run.train.stop_at",
        "study/test_tasks.py::test_an_accuracy_of_exactly_stop_at_ends_a_run",
    ),
    Mutant(
        "a sweep chooses the worst rate",
        SWEEP,
        "chosen = min(losses,",
        "chosen = max(losses,",
        T_SWEEP + "what_is_chosen_and_said",
    ),
    Mutant(
        "a sweep chooses the higher of equal rates",
        SWEEP,
        "(losses[rate].value, rate))",
        "(losses[rate].value, -rate))",
        T_SWEEP + "what_is_chosen_and_said",
    ),
    Mutant(
        "a sweep accepts a loss that is not finite",
        SWEEP,
        "if found and math.isfinite(found[-1].value) else None",
        "if found else None",
        T_SWEEP + "what_is_chosen_and_said",
    ),
    Mutant(
        "run hash: options added later do not count",
        PLAN,
        "if key in ALWAYS_COUNTED or key in changed}",
        "if key in ALWAYS_COUNTED}",
        T_MERGE + "a_recorded_hash_stays_what_it_is",
    ),
    Mutant(
        "run hash: train.keep counts",
        PLAN,
        'NEVER_COUNTED = ("keep",)',
        "NEVER_COUNTED = ()",
        "study/test_stored_weights.py::test_which_weights_stay_is_no_part_of_a_run",
    ),
    Mutant(
        "run hash: the examples of a task do not count",
        PLAN,
        "content.append(self.examples)",
        "pass",
        "study/test_tasks.py::test_a_run_per_architecture_task_and_seed",
    ),
    Mutant(
        "a study that grows forgets its seeds",
        MERGE,
        '{"seeds": _union(held.seeds, wanted.seeds)}',
        '{"seeds": wanted.seeds}',
        T_MERGE + "what_is_new_comes_behind",
    ),
    Mutant(
        "a study that grows accepts another architecture of one name",
        MERGE,
        "_refuse_other(entry, theirs.get(entry.name, entry), where, entry.name)",
        "pass",
        T_MERGE + "another_architecture_of_one_name_is_refused_and_may_have_another",
    ),
    Mutant(
        "until decided: each look spends the whole level",
        "analysis/sequential.py",
        "level * (spent[-1] - (spent[-2] if len(spent) > 1 else 0.0))",
        "level * spent[-1]",
        "analysis/test_noise.py::test_levels_of_all_looks_add_up",
    ),
    Mutant(
        "until decided: a verdict on these models alone ends it",
        "study/until_decided.py",
        "return row.conditional or (row.verdict",
        "return (row.verdict",
        "study/test_until_decided.py::test_a_verdict_on_these_models_only_is_none_to_stop_at",
    ),
    Mutant(
        "a run of exactly LEAST_PROGRESS does not count",
        "analysis/comparison.py",
        "curve.trained[-1] >= LEAST_PROGRESS * furthest",
        "curve.trained[-1] > LEAST_PROGRESS * furthest",
        "analysis/test_gap.py::test_a_run_that_has_only_begun_does_not_count",
    ),
    Mutant(
        "windows of text are read in order",
        "data/stream.py",
        "permuted(index, windows, seed, epoch, pool)",
        "index",
        "data/test_stream.py::test_epochs_and_seeds_differ",
    ),
    Mutant(
        "every epoch reads windows in the same order",
        "data/stream.py",
        "permuted(index, windows, seed, epoch, pool)",
        "permuted(index, windows, seed, 0, pool)",
        "data/test_stream.py::test_epochs_and_seeds_differ",
    ),
    Mutant(
        "every epoch cuts the text at the same places",
        "data/stream.py",
        "offset = _keyed(seed, epoch, pool, 0)",
        "offset = _keyed(seed, 0, pool, 0)",
        "data/test_stream.py::test_epochs_and_seeds_differ",
    ),
    Mutant(
        "overlap: the last training sequence is not compared",
        "data/overlap.py",
        "range(0, len(run) - n + 1, CHUNK)",
        "range(0, len(run) - n, CHUNK)",
        "data/test_overlap.py::test_shares_are_those_of_the_definition",
    ),
    Mutant(
        "overlap: a share of exactly data.overlap is left out",
        "data/preparation.py",
        "np.flatnonzero(found > limit)",
        "np.flatnonzero(found >= limit)",
        "data/test_overlap.py::test_documents_mostly_in_the_training_text_are_left_out",
    ),
    Mutant(
        "shards: checksums are not compared",
        "data/shards.py",
        'file_digest(path / name) == self.about["checksums"][name]',
        'file_digest(path / name) != ""',
        "data/test_shards.py::test_damage_is_seen",
    ),
    Mutant(
        "data hash: the limit of overlap does not count",
        "data/config.py",
        'exclude = {"cache", "workers", "seq_len", "weights"}',
        'exclude = {"cache", "workers", "seq_len", "weights", "overlap"}',
        "data/test_preparation.py::test_any_option_that_changes_tokens_changes_the_key",
    ),
    Mutant(
        "kernels: compute capability 8.0 is too old",
        "ops/_dispatch.py",
        "get_device_capability(device) < (8, 0)",
        "get_device_capability(device) <= (8, 0)",
        "ops/test_dispatch.py::test_what_a_card_needs_for_the_kernels",
    ),
    Mutant(
        "kernels: just enough shared memory is too little",
        "ops/_dispatch.py",
        "shared_memory_per_multiprocessor < shared",
        "shared_memory_per_multiprocessor <= shared",
        "ops/test_dispatch.py::test_what_a_card_needs_for_the_kernels",
    ),
    Mutant(
        "kernels: heads of exactly the widest size are refused",
        "ops/_dispatch.py",
        "x.shape[-1] > widest",
        "x.shape[-1] >= widest",
        "ops/test_dispatch.py::test_the_interpreter_runs_float32_alone",
    ),
    Mutant(
        "kernels: the interpreter runs bfloat16",
        "ops/_dispatch.py",
        "return None if dtype == torch.float32 else",
        "return None if dtype != torch.float16 else",
        "ops/test_dispatch.py::test_the_interpreter_runs_float32_alone",
    ),
)


def _test(copy: Path, tests: list[str]) -> None:
    """Run tests of the copy, with their output in a file; the exit code is that of pytest."""
    os.setsid()
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    sys.dont_write_bytecode = True  # the copy's bytecode is checked by content, not by time
    with (copy / "output").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)])
    sys.stdout.flush()
    os._exit(int(code))


def run(copy: Path, tests: list[str]) -> int | None:
    """Return the exit code of pytest, negative if a signal ended it, None if it did not end."""
    process = multiprocessing.get_context("fork").Process(target=_test, args=(copy, tests))
    process.start()
    process.join(LIMIT)
    ended = not process.is_alive()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what the tests started
    process.join()
    return process.exitcode if ended else None


def verdict(copy: Path, mutant: Mutant) -> str:
    """Return "survived", or how the mutant was killed; raises RuntimeError for one that cannot be tried."""
    path = copy / "basecap" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise RuntimeError(f"{mutant.what}: the text to replace occurs {text.count(mutant.old)} times in {mutant.file}")
    path.write_text(text.replace(mutant.old, mutant.new))
    code = run(copy, [mutant.tests])
    path.write_text(text)
    if code == 0:
        return "survived"
    if code is None:
        return "killed (its tests did not end)"
    if code < 0:
        return f"killed ({signal.Signals(-code).name})"
    output = (copy / "output").read_text()
    if code != pytest.ExitCode.TESTS_FAILED:
        raise RuntimeError(f"{mutant.what}: pytest ended with {code}:\n{output}")
    return "killed"


def main(words: list[str]) -> int:
    """Try the mutants and print the table; return how many survived."""
    torch.set_num_threads(1)
    mutants = [mutant for mutant in MUTANTS if not words or any(word in mutant.what for word in words)]
    if not mutants:
        sys.exit(f"error: no mutant is described by {' or '.join(map(repr, words))}; leave it out to try all.")
    start, survived = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for name in ("basecap", "tests", "benchmarks"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        checked = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(copy / "basecap", quiet=1, invalidation_mode=checked)
        if run(copy, list(dict.fromkeys(mutant.tests for mutant in mutants))) != 0:
            raise RuntimeError(f"the tests fail without a mutant:\n{(copy / 'output').read_text()}")
        print("| fault | file | tests | result |\n| --- | --- | --- | --- |")
        for mutant in mutants:
            found = verdict(copy, mutant)
            survived += found == "survived"
            print(f"| {mutant.what} | {mutant.file} | {mutant.tests.replace('::', ' ')} | {found} |", flush=True)
    print(f"\n{len(mutants)} mutants, {len(mutants) - survived} killed, {survived} survived.")
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
    return survived


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
