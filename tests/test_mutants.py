"""The mutants of `benchmarks.mutants` fit the code and the tests as they are."""

from benchmarks.mutants import MUTANTS, ROOT


def test_every_mutant_changes_one_place_and_names_tests_that_exist():
    for mutant in MUTANTS:
        assert (ROOT / "basecap" / mutant.file).read_text().count(mutant.old) == 1, mutant.what
        for test in mutant.tests.split():
            file, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / "tests" / file).read_text(), mutant.what
