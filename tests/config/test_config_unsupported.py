"""What no code serves yet is refused by name; what is served, or means nothing at degree 1, is not."""

from typing import Any

import pytest
import yaml

from kenotron.config import InputError, NotSupportedYet, load, refuse_unsupported
from kenotron.config.decoder import ACTIVATIONS


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["lighteval={}"], "lighteval"),
        (["model.model_config={is_starcoder2_config: true, attn_pdrop: 0.1}"], "model_config.attn_pdrop: 0.1"),
        (["model.model_config={is_qwen2_config: true, _use_doc_masking: true}"], "model_config._use_doc_masking: True"),
        (["model.model_config={is_qwen2_config: true, rope_seq_len_interpolation_factor: 2.0}"], "interpolation_fac"),
        (["model.model_config._attn_implementation=ring"], "set parallelism.context_parallel_method: ring"),
        (["checkpoints.local={path: x, interval: 1, copy_to_next_machine: true}"], "copy_to_next_machine: True"),
    ],
)
def test_it_is_refused_by_name(minimal: dict[str, Any], overrides: list[str], named: str) -> None:
    with pytest.raises(NotSupportedYet) as caught:
        refuse_unsupported(load(minimal, overrides))
    said = str(caught.value)
    assert said.startswith("not supported yet: ")
    assert named in said
    assert len(said.splitlines()) == 1


def test_everything_unsupported_is_named_at_once(minimal: dict[str, Any]) -> None:
    with pytest.raises(NotSupportedYet, match=r"dtype: float64; .*lighteval|lighteval.*; .*dtype: float64"):
        refuse_unsupported(load(minimal, ["model.dtype=float64", "lighteval={}"]))


def test_unserved_keys_of_a_file_are_named_with_their_lines(minimal: dict[str, Any], write: Any) -> None:
    path = write(yaml.safe_dump(minimal | {"lighteval": {"batch_size": 8}, "logging": {"log_dir": "s3://a/b"}}))
    lighteval, log_dir = map(path.read_text().splitlines().index, ("lighteval:", "  log_dir: s3://a/b"))
    with pytest.raises(NotSupportedYet) as caught:
        load(path)
    assert str(caught.value) == (
        "not supported yet: lighteval without a YAML file's tasks.tasks (expected evaluation: {tasks: [hellaswag]})"
        f" ({path}:{lighteval + 1}); logging.log_dir: s3://a/b: expected a local path ({path}:{log_dir + 1})"
    )


@pytest.mark.parametrize("url", ["s3://a/b", "s3:/a/b", "file:///a/b"])
@pytest.mark.parametrize(
    "path",
    [
        *("checkpoints.staging_path", "checkpoints.local.path", "logging.log_dir", "general.benchmark_csv_path"),
        *("profiler.profiler_export_path", "remote_data.cache_folder", "model.init_method.path"),
    ],
)
def test_a_url_is_no_local_path(minimal: dict[str, Any], path: str, url: str) -> None:
    with pytest.raises(NotSupportedYet) as caught:
        load(minimal, [f"{path}={url}"])
    assert str(caught.value) == f"not supported yet: {path}: {url}: expected a local path"


@pytest.mark.parametrize("url", ["s3:/a/b", "s3://", "hf://a/b"])
@pytest.mark.parametrize("path", ["checkpoints.checkpoints_path", "checkpoints.resume_checkpoint_path"])
def test_checkpoints_go_to_stores_and_nowhere_else(minimal: dict[str, Any], path: str, url: str) -> None:
    for good in ("s3://a/b", "gs://a/b", "memory://a"):
        load(minimal, [f"{path}={good}"])
    with pytest.raises(NotSupportedYet) as caught:
        load(minimal, [f"{path}={url}"])
    expected = "expected a local path, or a store's URL such as s3://bucket/run"
    assert str(caught.value) == f"not supported yet: {path}: {url}: {expected}"


UPLOAD = "s3_upload={upload_s3_path: 's3://a/b', remove_after_upload: false}"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["checkpoints.staging_path=x"], "checkpoints.staging_path: expected a URL as checkpoints.checkpoints_path"),
        (["checkpoints.remove_after_upload=true"], "checkpoints.remove_after_upload: expected a URL"),
        ([UPLOAD, "s3_upload.upload_s3_path=b/run"], r"s3_upload.upload_s3_path: expected a URL \(s3://bucket/run\)"),
        ([UPLOAD, "checkpoints.checkpoints_path=s3://c"], "s3_upload: expected null: checkpoints.checkpoints_path is"),
    ],
)
def test_keys_of_uploads_that_do_not_fit(minimal: dict[str, Any], overrides: list[str], named: str) -> None:
    with pytest.raises(InputError, match=named):
        load(minimal, overrides)


@pytest.mark.parametrize("folder", ["checkpoints", "~/runs/a", "/data/s3:/a", "./s3:/a", "C:/runs", "a:b"])
def test_a_local_path_is_no_url(minimal: dict[str, Any], folder: str) -> None:
    load(minimal, [f"checkpoints.checkpoints_path={folder}", f"logging.log_dir={folder}"])


OFF = yaml.safe_load("""{general: {benchmark_csv_path: null}, tokens: {limit_test_batches: 0}, lighteval: null,
    checkpoints: {checkpointing_engine: TORCH, datastates: null,
    local: {path: /dev/shm/runs, interval: 5, copy_to_next_machine: false}}}""")


def test_values_that_ask_for_nothing_are_left_out(minimal: dict[str, Any]) -> None:
    """Configs that older versions wrote name every key with its default."""
    expected = load(minimal, ["checkpoints.local={path: /dev/shm/runs, interval: 5}"])
    for section, keys in OFF.items():
        minimal[section] = minimal.get(section, {}) | keys if isinstance(keys, dict) else keys
    assert load(minimal) == expected


def test_the_activations_that_pass_are_those_that_the_kernel_computes() -> None:
    from kenotron.kernels import swiglu

    assert set(swiglu.ACTIVATIONS) == set(ACTIVATIONS)
