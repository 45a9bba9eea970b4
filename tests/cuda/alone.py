"""Tests that run under pytest, and as programs without it: a machine with a GPU may have torch and no pytest.

As programs they add a line "passed failed skipped" to the file that PHSA_TEST_COUNTS names, if it does.
"""

import itertools
import os
import sys
import traceback

try:
    import pytest
except ImportError:
    pytest = None


class Skipped(Exception):
    """What a test raises that cannot run here."""


def _count(passed, failed, skipped):
    if path := os.environ.get("PHSA_TEST_COUNTS"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{passed} {failed} {skipped}\n")


def skip(why, code=1):
    """Ends the file that calls it: skipped under pytest, else as a program with this exit code."""
    if "PYTEST_VERSION" in os.environ:
        pytest.skip(why, allow_module_level=True)
    print(why, file=sys.stderr)
    _count(0, int(code != 0), int(code == 0))
    sys.exit(code)


def skip_test(why):
    """Ends the test that calls it."""
    if "PYTEST_VERSION" in os.environ:
        pytest.skip(why)
    raise Skipped(why)


def over(**values):
    """Runs a test for every combination of these values of its arguments."""

    def mark(test):
        test.over = values
        for name, choices in values.items() if pytest else ():
            test = pytest.mark.parametrize(name, list(choices), ids=str)(test)
        return test

    return mark


def run_tests(namespace, patterns):
    """Runs every test_* of `namespace` whose name and arguments hold one of the patterns; without any, all. Every
    failure is shown, the rest still runs. A pattern that no test holds is an error. Returns the exit code."""
    failed = skipped = count = 0
    unheld = set(patterns)
    for name, test in list(namespace.items()):
        if not name.startswith("test_"):
            continue
        values = getattr(test, "over", {})
        for chosen in itertools.product(*values.values()):
            label = " ".join([name, *map(str, chosen)])
            held = [part for part in patterns if part in label]
            if patterns and not held:
                continue
            unheld.difference_update(held)
            count += 1
            print(label, flush=True)
            try:
                test(**dict(zip(values, chosen, strict=True)))
            except Skipped as why:
                skipped += 1
                print(f"skipped: {why}")
            except (Exception, SystemExit) as error:
                failed += 1
                print(f"FAILED {label}")
                traceback.print_exc(limit=-3)
                if "CUDA error" in str(error):  # the device answers nothing from then on
                    print("the rest is not run")
                    _count(count - failed - skipped, failed, skipped)
                    return 1
    for part in sorted(unheld):
        failed += 1
        count += 1
        print(f"FAILED no test's name and arguments hold {part!r}")
    print(f"{count - failed - skipped} passed, {failed} failed, {skipped} skipped")
    _count(count - failed - skipped, failed, skipped)
    return 1 if failed else 0
