"""The same question over the same long text with dense attention, InfLLM v2 and PHSA: answers, speeds, tokens read.

    python3 scripts/demo_compare.py build/release/bin/phsa smollm2-135m

The text is some pages of a public-domain book with a page about a lighthouse among them, once in the middle and once
at the end.
"""

import json
import pathlib
import subprocess
import sys

DATA = pathlib.Path(__file__).resolve().parent.parent / "bench/data"
QUESTION = "What did the town give to Mary Ellison?"
RIGHT = "silver watch"
NAMES = {"dense": "dense", "infllm2": "InfLLM v2", "phsa": "PHSA"}


def ask(program: str, model: str, text: str, attention: str) -> dict:
    flags = ["--attention", attention, "--temp", "0", "-n", "32", "--json"]
    command = [program, "run", "-m", model, "-f", "-", "-p", QUESTION, *flags]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"demo: {' '.join(command)} failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def main() -> None:
    program, model = sys.argv[1:]
    book = (DATA / "from_sand_hill_to_pine.txt").read_text()
    page = (DATA / "lighthouse.txt").read_text()
    texts = {
        "in the middle": book[:9000] + "\n\n" + page + "\n" + book[9000:14000],
        "at the end": book[:14000] + "\n\n" + page,
    }
    print(f'"{QUESTION}" The page that says it (a {RIGHT}) is')
    wrong = {name: 0 for name in NAMES}
    speeds = {name: [] for name in NAMES}
    for place, text in texts.items():
        for attention, name in NAMES.items():
            answer = ask(program, model, text, attention)
            is_right = RIGHT in answer["text"].lower()
            wrong[attention] += not is_right
            speeds[attention].append(answer["prefill_tokens_per_s"])
            first_line = answer["text"].strip().split("\n")[0]
            speed = f"{answer['prefill_tokens_per_s']:5.0f}/s, written at {answer['decode_tokens_per_s']:4.0f}/s"
            print(
                f"  {place + ',' if attention == 'dense' else '':15} {name:9} {answer['prompt_tokens']} tokens read at "
                f"{speed}, {100 * answer['read_share']:3.0f} % of the tokens read: "
                f"{'right' if is_right else 'WRONG'}: {first_line[:90]}"
            )
    ratio = max(speeds["phsa"]) / max(speeds["dense"])
    print(
        f"PHSA read the text {ratio:.1f} times as fast as dense attention did; the longer the text, the larger the gap."
    )
    if wrong["phsa"] > wrong["dense"]:
        print(
            f"It was wrong {wrong['phsa']} of {len(texts)} times, dense {wrong['dense']}: this model of 135 million "
            "parameters was not trained for sparse attention,\nand so small a model finds far less with it. Larger "
            "ones lose less (docs/niah.md)."
        )


if __name__ == "__main__":
    main()
