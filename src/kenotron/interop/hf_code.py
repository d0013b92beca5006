"""Exports of models that transformers does not have include the code of the model (`Family.hf_code`).

    my_family.py                 hf_code = {"AutoConfig": "configuration_mine.MineConfig",
    hf/configuration_mine.py                "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    hf/modeling_mine.py

The files are copied beside the weights, and ``config.json`` names the classes (``auto_map``), so that
``from_pretrained(folder, trust_remote_code=True)`` finds them. An import reads weights and config; it runs no code.
"""

import importlib.util
import inspect
import shutil
from pathlib import Path
from typing import Any

from kenotron.config.errors import InputError
from kenotron.models.family import Family


def code_files(family: Family[Any] | type[Family[Any]]) -> list[Path]:
    """Return the files that an export of this family includes; they are in the folder ``hf`` beside the family's file.

    Raises InputError if one is missing.
    """
    folder = Path(inspect.getfile(type(family))).parent / "hf"
    files = [folder / f"{module}.py" for module in sorted({each.split(".")[0] for each in family.hf_code.values()})]
    for file in files:
        if not file.is_file():
            raise InputError(f"no file {file}, which hf_code of {type(family).__name__} names")
    return files


def copy_code(family: Family[Any], folder: Path) -> None:
    """Copy the family's code files into `folder`."""
    for file in code_files(family):
        shutil.copyfile(file, folder / file.name)


def config_class(family: Family[Any] | type[Family[Any]]) -> Any:
    """Return the family's config class, from transformers or from the family's code files, which are executed."""
    from transformers import CONFIG_MAPPING

    if not family.hf_code:
        return CONFIG_MAPPING[family.hf_model_type]
    module, name = family.hf_code["AutoConfig"].split(".")
    (file,) = (file for file in code_files(family) if file.stem == module)
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return getattr(loaded, name)
