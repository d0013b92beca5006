"""`general.benchmark_csv_path`: the row's numbers against metrics.jsonl, the config, and counts by hand."""

import csv
import resource
from pathlib import Path

import pytest

from kenotron.config import InputError, load
from kenotron.observers.benchmark import columns_of
from support.tiny_run import metrics, tiny_config, train_and_listen, train_quietly

# Of nanotron's benchmark table.
COLUMNS = """job_id,name,nodes,seq_len,mbs,batch_accum,gbs,mTFLOPs,hTFLOPs,tok/s/gpu,Mem Alloc (GB),Mem Res (GB),dp,pp,
tp,cp,ep,pp_engine,tp_mode,tp_async_comm,recompute_layer,hidden_size,hidden_act,num_layers,num_heads,num_kv_heads,max_pos,
vocab_size,tie_word_embeddings,dtype,zero_stage,ddp_bucket_cap_mb,accumulate_grad_in_fp32,Total Params,Local Params"""


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def bench(folder: Path) -> tuple[str, Path]:
    path = folder / "tables" / "bench.csv"
    return f"general.benchmark_csv_path={path}", path


def test_a_run_adds_one_row_with_its_speed_and_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    key, path = bench(tmp_path)
    config = tiny_config(tmp_path, key, "tokens.train_steps=6", "tokens.batch_accumulation_per_replica=2")
    train_quietly(config)
    (row,) = rows(path)
    assert list(row) == COLUMNS.replace("\n", "").split(",")
    counted = metrics(config)[3:]  # the first three steps warm up
    seconds = sum(step["elapsed_time_per_iteration_ms"] for step in counted) / 1000
    assert float(row["tok/s/gpu"]) == pytest.approx(3 * 2 * 4 * 16 / seconds, rel=1e-5)
    flops = [step["model_tflops_per_gpu"] * step["elapsed_time_per_iteration_ms"] / 1000 for step in counted]
    assert float(row["mTFLOPs"]) == pytest.approx(sum(flops) / seconds, rel=1e-5)
    assert row["hTFLOPs"] == row["mTFLOPs"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
    assert 0 < float(row["Mem Alloc (GB)"]) <= peak * 1.0001
    # 2 layers of width 16: q, o 16x16, k, v 8x16, three 24x16, two norms; embedding and head of 64 rows, a last norm
    parameters = 2 * (2 * 256 + 2 * 128 + 3 * 384 + 2 * 16) + 2 * 64 * 16 + 16
    assert (row["Total Params"], row["Local Params"]) == (str(parameters), str(parameters))
    given = """job_id=4711 name=tiny seq_len=16 mbs=4 batch_accum=2 gbs=8 hidden_size=16 num_layers=2 num_heads=4
        num_kv_heads=2 max_pos=32 vocab_size=64 dtype=float32 zero_stage=0 ddp_bucket_cap_mb=25
        tie_word_embeddings=False accumulate_grad_in_fp32=True tp_mode=ALL_REDUCE"""
    assert {*given.split()} <= {f"{name}={value}" for name, value in row.items()}
    assert {row[name] for name in ("nodes", "dp", "pp", "tp", "cp", "ep")} == {"1"}


def test_the_batch_of_a_row_is_that_of_all_replicas(tmp_path: Path) -> None:
    run = train_quietly(tiny_config(tmp_path, "tokens.train_steps=1"))
    run.config = load(run.config, ["parallelism.dp=4"])
    assert columns_of(run, {})["gbs"] == 4 * 4


def test_runs_share_a_file_and_a_short_one_counts_all_of_its_steps(tmp_path: Path) -> None:
    key, path = bench(tmp_path)
    train_quietly(tiny_config(tmp_path, key, "tokens.train_steps=2"))
    config = tiny_config(tmp_path / "other", key, "tokens.train_steps=3", "general.run=second, wider")
    train_quietly(config)
    assert [row["name"] for row in rows(path)] == ["tiny", "second, wider"]
    seconds = sum(step["elapsed_time_per_iteration_ms"] for step in metrics(config)) / 1000
    assert float(rows(path)[1]["tok/s/gpu"]) == pytest.approx(3 * 4 * 16 / seconds, rel=1e-5)
    assert train_quietly(config).finished
    assert len(rows(path)) == 2  # a run that is finished already adds none


def test_nanotrons_benchmark_mode_ends_after_four_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOTRON_BENCHMARK", "1")
    key, path = bench(tmp_path)
    config = tiny_config(tmp_path, key, "tokens.train_steps=50")
    run, said = train_and_listen(config)
    assert (run.step, len(rows(path))) == (4, 1)
    assert "Run stopped (NANOTRON_BENCHMARK=1) at step 4 of 50" in said
    assert float(rows(path)[0]["tok/s/gpu"]) == pytest.approx(metrics(config)[3]["tokens_per_sec_per_gpu"], rel=1e-5)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"step,loss\n1,2\n",
            "expected a new file, or one with the 35 columns of a benchmark row; .* has the column 'st",
        ),
        (b"job_id,name\n1,2\n", "bench.csv has 2 columns"),
        (b"\xff\xfe\x00", "cannot write to .*bench.csv: not a CSV file"),
    ],
)
def test_a_file_with_other_columns_is_refused_before_the_first_step(tmp_path: Path, content: bytes, said: str) -> None:
    key, path = bench(tmp_path)
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"general.benchmark_csv_path: .*{said}"):
        train_quietly(tiny_config(tmp_path, key))
    assert path.read_bytes() == content


def test_a_folder_that_cannot_be_made_is_named_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "tables").write_text("a file")
    key, path = bench(tmp_path)
    with pytest.raises(InputError, match=f"general.benchmark_csv_path: cannot write to {path}: File exists"):
        train_quietly(tiny_config(tmp_path, key))
