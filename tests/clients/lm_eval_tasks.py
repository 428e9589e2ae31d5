"""Local lm-eval tasks: a multiple choice and a generation, a dozen questions each, without any hub."""

from __future__ import annotations

import json
from pathlib import Path

QUESTIONS = [
    ("The capital of France is", [" Paris", " London", " Rome"]),
    ("The capital of Italy is", [" Madrid", " Rome", " Berlin"]),
    ("Water freezes into", [" ice", " steam", " sand"]),
    ("The opposite of hot is", [" warm", " cold", " red"]),
    ("Two plus two is", [" five", " three", " four"]),
    ("The sun rises in the", [" east", " west", " north"]),
    ("A baby dog is called a", [" kitten", " puppy", " calf"]),
    ("Grass is usually", [" purple", " blue", " green"]),
]
_CHOICE = """\
task: disagg_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""
_GENERATION = """\
task: disagg_generation
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n", "."], max_gen_toks: 12}}
metric_list:
  - metric: exact_match
"""
ANSWERS = [0, 1, 0, 1, 2, 0, 1, 2]


def write(folder: Path) -> None:
    data = folder / "questions.jsonl"
    rows = [{"question": text, "choices": choices, "answer": answer} for (text, choices), answer in zip(QUESTIONS, ANSWERS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "choice.yaml").write_text(_CHOICE.format(data=data), encoding="utf-8")
    (folder / "generation.yaml").write_text(_GENERATION.format(data=data), encoding="utf-8")
