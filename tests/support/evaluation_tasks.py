"""Three tasks of lm_eval with data of their own: choices, whole texts, and texts to be written."""

import json
from pathlib import Path

QUESTIONS = [
    {"question": "return the cat that", "choices": ["sat", "main", "on the mat"], "answer": 0},
    {"question": "def main", "choices": ["(argument):", "é", "中文 naïve"], "answer": 1},
    {"question": "the mat", "choices": ["é", "that"], "answer": 1},
]
TEXTS = ["def main(argument):\n    return the cat\n", "naïve é 中文; the mat sat on the cat " * 12]
TASKS = {
    "choices": "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: choices\n"
    "doc_to_target: answer\nmetric_list: [{metric: acc}]\n",
    "texts": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list: [{metric: bits_per_byte}]\n",
    "written": "output_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
    'generation_kwargs: {until: ["\\n"], max_gen_toks: 6, do_sample: false}\nmetric_list: [{metric: exact_match}]\n',
}


def write_tasks(folder: Path) -> Path:
    """The tasks, with their data beside them."""
    (folder / "tasks").mkdir(exist_ok=True)
    rows = {"choices": QUESTIONS, "texts": [{"text": text} for text in TEXTS], "written": QUESTIONS}
    for name, text in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]), encoding="utf-8")
        source = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        (folder / "tasks" / f"{name}.yaml").write_text(source + "test_split: test\n" + text, encoding="utf-8")
    return folder / "tasks"
