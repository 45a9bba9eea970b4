"""`make demo`, from where the program is built: it can be repeated, and the second time it needs no network."""

import json
import os
import shutil
import subprocess

from conftest import BIN, ROOT

# Whoever asks for something from elsewhere gets nothing.
OFFLINE = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}


def test_the_demo_takes_another_model_by_its_name():
    command = [ROOT / "scripts/demo.sh", BIN, "--model", "nobody-has-this", "--sections", "answers"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "nobody-has-this" in done.stderr and "qwen2.5-coder-0.5b" in done.stderr


def test_the_demo_can_be_repeated_and_needs_no_network_for_a_model_that_is_here(smollm2, tmp_path):
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/demo.sh", tmp_path / "scripts")
    for folder in ("bench/data", "models"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for parts in ("flops", "answers,flops"):  # the first time in little, so that there is something to repeat
        command = [tmp_path / "scripts/demo.sh", BIN, "--sections", parts, "--answer-tokens", "48"]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **OFFLINE, "PIP_NO_INDEX": "1"}
        )
        assert done.returncode == 0, done.stderr
        for words in ("Who built the lighthouse?", "was trained with PHSA", "demo/report.html"):
            assert words in done.stdout
        assert (tmp_path / "demo/report.html").exists()
    assert "answers right" in done.stdout
    answers = json.loads((tmp_path / "demo/report.json").read_text())["answers"]
    assert len(answers) == 9 and {answer["attention"] for answer in answers} == {"dense", "infllm2", "phsa"}
    # The text is one that this model can answer about.
    assert all(answer["right"] for answer in answers if answer["attention"] == "dense")
    assert all(answer["read_share"] < 0.5 for answer in answers if answer["attention"] == "phsa")
