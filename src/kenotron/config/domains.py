"""Rewrite the domains of `doremi` as lists and mixtures before validation.

doremi:                                          data_stages.0.data.dataset:
  domain_names: code, prose                →       mixture:
  domain_weights: 0.7, 0.3                         - {text_files: texts/code, weight: 0.7}
data_stages.0.data.dataset: {text_files: texts}    - {text_files: texts/prose, weight: 0.3}
"""

import json
from pathlib import Path
from typing import Any

from kenotron.config.document import Document, Keys
from kenotron.config.errors import InputError, no_such_path

FOLDER_KEYS = ("hf_dataset_or_datasets", "text_files", "tokens", "dataset_folder")


def resolve_domains(document: Document) -> None:
    """Replace `doremi`'s texts and files by lists, and a dataset that is a folder of domains by their mixture.

    Raises InputError if `domain_weights` names a file that cannot be read, or that has other domains.
    """
    doremi = document.get("doremi")
    if not isinstance(doremi, dict):
        return
    names, weights = (doremi.get(name) for name in ("domain_names", "domain_weights"))
    if isinstance(names, str):
        names = doremi["domain_names"] = [name.strip() for name in names.split(",")]
    if isinstance(weights, str):
        weights = doremi["domain_weights"] = _numbers(document, weights, names)
    if isinstance(names, list) and (weights is None or isinstance(weights, list)):
        stages = document.get("data_stages")
        for number in range(len(stages) if isinstance(stages, list) else 0):
            _mix(document, ("data_stages", number, "data", "dataset"), names, weights)


def _numbers(document: Document, text: str, names: Any) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        pass
    key, file = "doremi.domain_weights", Path(text)
    if not file.is_file():
        raise no_such_path(key, file)
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        domains = [str(name) for name in saved["domain_names"]]
        weights = [float(weight) for weight in saved["domain_weights"]]
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{key}: {text}: expected the doremi.json that a proxy run writes") from None
    if domains != names:
        raise InputError(f"{key}: {text} is of the domains {', '.join(domains)}; found doremi.domain_names {names}")
    return weights


def _mix(document: Document, keys: Keys, names: list[Any], weights: list[Any] | None) -> None:
    dataset = document.get(*keys)
    if not isinstance(dataset, dict):
        return
    folder = next((name for name in FOLDER_KEYS if isinstance(dataset.get(name), str)), None)
    if "mixture" not in dataset and folder is not None:
        mixture: Any = [{**dataset, folder: f"{dataset[folder]}/{name}", "weight": "tokens"} for name in names]
        document.put(keys, {"mixture": mixture}, document.place(keys))
    mixture = document.get(*keys, "mixture")
    if weights is not None and isinstance(mixture, list) and len(mixture) == len(weights):
        for number, weight in enumerate(weights):
            if isinstance(mixture[number], dict):
                mixture[number]["weight"] = weight
