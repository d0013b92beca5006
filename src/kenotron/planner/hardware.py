"""The kinds of GPUs that a run can be planned for, by the names of `kenotron plan --gpu`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
import yaml
from pydantic import Field, TypeAdapter, ValidationError

from kenotron.config.errors import InputError, nearest, os_errors
from kenotron.config.packaged import packaged_yaml
from kenotron.config.parallelism import stays_on_cpu

GIB = 1 << 30
Positive = Annotated[float, Field(gt=0)]  # checked only in files
Share = Annotated[float, Field(gt=0, le=1.5)]  # some GPUs run faster than their data sheets


class Gpu(NamedTuple):
    """A GPU as torch sees it, with the fields of parallel/gpus.yaml; an unknown kind has only the memory.

    The shares of the peaks that are reached: `products` of `flops` and `fp32` in large products, `attention` of `flops`
    by head_dim, `memory` of `bandwidth`. The defaults were measured on one H200 (docs/benchmarks.md). `price` is that
    of an hour.
    """

    name: str
    device: str
    memory_gib: Positive
    vendor: Literal["nvidia", "amd"]
    capability: tuple[int, int] = (0, 0)
    flops: Positive = 0.0
    fp32: Positive = 0.0
    bandwidth: Positive = 0.0
    processors: Annotated[int, Field(gt=0)] = 1
    link: Positive = 0.0
    network: Positive = 0.0
    watts: Annotated[float, Field(ge=0)] = 0.0
    price: Annotated[float, Field(ge=0)] = 0.0
    in_machine: Annotated[int, Field(gt=0)] = 8
    products: Share = 0.75
    attention: Annotated[Mapping[int, Share], Field(min_length=1)] = {64: 0.31, 128: 0.44}
    memory: Share = 0.64


GPUS = {
    name: Gpu(**fields | {"capability": tuple(fields.get("capability", (0, 0)))})
    for name, fields in packaged_yaml("kenotron.parallel", "gpus.yaml").items()
}


def gpu_called(name: str) -> Gpu:
    """Return the GPU of a name, in any case, or of a YAML file. Raises InputError with the known names."""
    if name.endswith((".yaml", ".yml")):
        return _read_gpu(Path(name))
    if (gpu := GPUS.get(name.lower())) is None:
        raise InputError(f"--gpu: expected {', '.join(GPUS)}, found {name!r}{nearest(name.lower(), GPUS)}")
    return gpu


def _read_gpu(path: Path) -> Gpu:
    with os_errors(f"--gpu: cannot read {path}"):
        content = path.read_bytes()
    try:
        gpu = TypeAdapter(Gpu).validate_python(yaml.safe_load(content))
    except (ValidationError, yaml.YAMLError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": "no valid YAML"}
        key = ".".join(map(str, first["loc"]))
        raise InputError(f"--gpu: {path}: {key}: {first['msg']}; expected a file of kenotron plan --measure") from None
    if gpu.flops and not all((gpu.fp32, gpu.bandwidth, gpu.link, gpu.network)):
        raise InputError(f"--gpu: {path}: expected fp32, bandwidth, link and network beside flops")
    return gpu


def gpu_here() -> Gpu | None:
    """Return the first GPU of this machine, with only its memory if it is not in `GPUS`; None if runs use the CPU."""
    if stays_on_cpu() or not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(0)
    memory, capability = device.total_memory / GIB, (0, 0) if torch.version.hip else (device.major, device.minor)
    unknown = Gpu("", "", memory, "amd" if torch.version.hip else "nvidia")
    candidates = [gpu for gpu in GPUS.values() if gpu.device in device.name] or [unknown]
    gpu = min(candidates, key=lambda gpu: abs(gpu.memory_gib - memory))
    processors = device.multi_processor_count
    return gpu._replace(name=device.name, memory_gib=memory, capability=capability, processors=processors)
