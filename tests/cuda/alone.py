"""Tests that run under pytest, and as programs without it: a machine with a GPU may have torch and no pytest."""

import itertools
import os
import sys
import traceback

try:
    import pytest
except ImportError:
    pytest = None


def skip(why, code=1):
    """Ends the file that calls it: skipped under pytest, else as a program with this exit code."""
    if "PYTEST_VERSION" in os.environ:
        pytest.skip(why, allow_module_level=True)
    print(why, file=sys.stderr)
    sys.exit(code)


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
    failure is shown, the rest still runs. Returns the exit code."""
    failed = count = 0
    for name, test in list(namespace.items()):
        if not name.startswith("test_"):
            continue
        values = getattr(test, "over", {})
        for chosen in itertools.product(*values.values()):
            label = " ".join([name, *map(str, chosen)])
            if not any(part in label for part in patterns or [""]):
                continue
            count += 1
            print(label, flush=True)
            try:
                test(**dict(zip(values, chosen, strict=True)))
            except (Exception, SystemExit) as error:
                failed += 1
                print(f"FAILED {label}")
                traceback.print_exc(limit=-3)
                if "CUDA error" in str(error):  # the device answers nothing from then on
                    print("the rest is not run")
                    return 1
    print(f"{count - failed} of {count} passed")
    return 1 if failed else 0
