"""Names of other packages that are not their public interface: the only ones that src/kenotron uses, each where it is.

A new version of such a package may move them: then a test here says which name, and which file uses it.
"""

import ast
import importlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from support.tiny_run import REPOSITORY

SOURCE = REPOSITORY / "src" / "kenotron"
NAMES = {
    "torch._assert_async": "kernels/linear_cross_entropy.py parallel/tensor.py",
    "torch._C._distributed_c10d": "parallel/torch_internals.py",
    "torch._dynamo.config.fail_on_recompile_limit_hit": "training/model_parts.py",
    "torch._dynamo.config.recompile_limit": "training/model_parts.py",
    "torch._foreach_add_": "optim/lion.py optim/soap.py",
    "torch._foreach_lerp": "optim/lion.py optim/muon.py",
    "torch._foreach_lerp_": "optim/combined.py optim/lion.py optim/muon.py",
    "torch._foreach_mul_": "optim/clip.py optim/lion.py optim/muon.py optim/soap.py",
    "torch._foreach_norm": "optim/clip.py",
    "torch._foreach_sign_": "optim/lion.py",
    "torch._C._current_autograd_node": "planner/ledger.py planner/trace.py",
    "torch._meta_registrations._meta_grouped_mm_common": "planner/stand_in.py",
    "torch._subclasses.fake_tensor.FakeTensor": "kernels/rms_norm.py planner/ledger.py planner/stand_in.py",
    "torch._subclasses.fake_tensor.FakeTensorMode": "parallel/partial_gradients.py planner/stand_in.py",
    "torch._subclasses.fake_tensor.unset_fake_temporarily": "planner/stand_in.py",
    "torch.cuda.memory._dump_snapshot": "observers/profiler.py",
    "torch.cuda.memory._record_memory_history": "observers/profiler.py",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives": "planner/stand_in.py",
    "torch.distributed.fsdp._fully_shard._fsdp_param": "planner/stand_in.py",
    "torch.distributed.distributed_c10d._get_default_store": "parallel/torch_internals.py",
    "torch.distributed.distributed_c10d._set_pg_timeout": "parallel/torch_internals.py",
    "torch.distributed.distributed_c10d._world.pg_map": "parallel/torch_internals.py",
    "torch.distributed.distributed_c10d._world.pg_names.items": "parallel/torch_internals.py",
    "torch.ops._c10d_functional": "parallel/collectives.py",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "kernels/attention.py",
    "torch.ops.aten._scaled_dot_product_flash_attention": "planner/stand_in.py",
    "torch.ops.aten._softmax_backward_data.out": "kernels/attention.py",
    "torch.ops.mkldnn._linear_pointwise": "kernels/products.py",
    "torch.optim.optimizer._get_fused_kernels_supported_devices": "planner/stand_in.py",
    "torch.testing._internal.distributed.fake_pg.FakeStore": "planner/rehearsal.py",
    "torch.utils._python_dispatch.TorchDispatchMode": "planner/ledger.py planner/trace.py",
    "torch.utils._pytree.tree_leaves": "models/document_separation.py observers/nonfinite.py "
    "parallel/partial_gradients.py planner/ledger.py planner/trace.py",
    "torch.utils.backend_registration._DummyBackendModule": "planner/stand_in.py",
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend": "planner/stand_in.py",
    "gcsfs.core.GCSFileSystem._request.__wrapped__": "storage/google.py",
}
"""Those that are imported, or reached from what is: their files."""

ATTRIBUTES = {
    "_apply": "models/__init__.py",
    "_buffers": "models/foreign_model.py models/module_state.py planner/stand_in.py",
    "_cdata": "planner/ledger.py planner/trace.py",
    "_compiled_call_impl": "generation/model_on_ranks.py",
    "_concatenate": "parallel/torch_internals.py",
    "_fingerprint": "text/hub_datasets.py",
    "_flatten": "parallel/torch_internals.py",
    "_backward_hooks": "models/blocks/linear.py",
    "_backward_pre_hooks": "models/blocks/linear.py",
    "_forward_hooks": "models/blocks/linear.py",
    "_forward_pre_hooks": "models/blocks/linear.py",
    "_local_scalar_dense": "planner/ledger.py",
    "_parameters": "planner/stand_in.py",
    "_info": "storage/drivers.py",
    "_scaled_dot_product_flash_attention": "kernels/blockwise_attention.py",
    "_scaled_dot_product_flash_attention_backward": "kernels/blockwise_attention.py",
    "_scaled_dot_product_flash_attention_for_cpu": "kernels/blockwise_attention.py",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "kernels/blockwise_attention.py",
    "_strip_protocol": "storage/fetching.py",
    "_version": "models/module_state.py",
}
"""Those of objects: their files."""

PUBLIC = {
    "_replace",
    "_asdict",
    "os._exit",
    "sys._current_frames",
    "sys._getframe",
}  # documented, whatever they are called
OVERRIDDEN = ("_get_init_p2p_neighbors_ops", "forward_maybe_with_nosync")  # in parallel/pipeline.py


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


def used_in(file: Path) -> tuple[set[str], set[str]]:
    """(private names by the package they come from, private attributes of objects that are not this file's own)."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    imported: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            tops = {each.name.partition(".")[0] for each in node.names if each.asname is None}
            imported |= {top: top for top in tops} | {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}

    def dotted(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return imported.get(node.id)
        before = dotted(node.value) if isinstance(node, ast.Attribute) else None
        return f"{before}.{node.attr}" if before and isinstance(node, ast.Attribute) else None

    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    names = {*imported.values(), *filter(None, map(dotted, attributes))}
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    of_objects = {
        node.attr
        for node in attributes
        if is_private(node.attr) and node.attr not in own and dotted(node) is None and not _is_own(node.value)
    }
    foreign = {name for name in names if is_private(name) and not name.startswith("kenotron")}
    longest = {name for name in foreign if not any(other.startswith(f"{name}.") for other in foreign)}
    return longest - PUBLIC, of_objects - PUBLIC


def _is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "ctx")


def test_the_source_uses_no_private_name_that_is_not_listed_here() -> None:
    names: dict[str, set[str]] = {}
    attributes: dict[str, set[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        for found, into in zip(used_in(file), (names, attributes)):
            for name in found:
                into.setdefault(name, set()).add(file.relative_to(SOURCE).as_posix())
    assert names == {name: set(files.split()) for name, files in NAMES.items()}
    assert attributes == {name: set(files.split()) for name, files in ATTRIBUTES.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_where_it_was(name: str) -> None:
    parts = name.split(".")
    module = next(".".join(parts[:n]) for n in range(len(parts), 0, -1) if _is_module(".".join(parts[:n])))
    found = importlib.import_module(module)
    for part in parts[len(module.split(".")) :]:
        assert hasattr(found, part), f"{name} has moved: {NAMES[name]} of src/kenotron uses it"
        found = getattr(found, part)


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def test_private_attributes_and_overridden_methods_are_where_they_were() -> None:
    import datasets
    from fsspec.implementations.http import HTTPFileSystem
    from fsspec.spec import AbstractFileSystem

    rows = datasets.Dataset.from_dict({"text": ["a"]})
    places = (nn.Module(), torch.zeros(()), torch.ops.aten, DeviceMesh, rows, HTTPFileSystem, AbstractFileSystem)
    for name, files in ATTRIBUTES.items():
        assert any(hasattr(place, name) for place in places), f"{name} has moved: {files} of src/kenotron uses it"
    for name in OVERRIDDEN:
        assert hasattr(PipelineStage, name), f"PipelineStage.{name} has moved: parallel/pipeline.py overrides it"
