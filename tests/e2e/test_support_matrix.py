"""The table of models in the documents is what the tests prove."""

import subprocess
import sys

from conftest import ROOT


def test_the_table_of_models_is_what_the_tests_prove():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/support-matrix.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
