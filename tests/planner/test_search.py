"""Which layouts `kenotron plan --search` tries."""

from kenotron.config import load
from kenotron.planner.hardware import GPUS
from kenotron.planner.search import changes, shapes_of
from support.plans import config_of

GPU = GPUS["h100"]._replace(in_machine=2)


def test_what_suits_one_layout_does_not_bind_the_others() -> None:
    own = "parallelism.pp_layers=[1, 3]|parallelism.dp_shard=2|model.model_config.num_hidden_layers=4"
    config = config_of(f"mixtral|dp=2 pp=2 ep=2 zero=1 engine=1f1b accum=4|{own}")
    shapes = [load(config, overrides) for overrides in shapes_of(config, GPU)]
    degrees = {(shape.parallelism.dp, shape.parallelism.tp, shape.parallelism.pp, shape.zero_stage) for shape in shapes}
    assert degrees == {(4, 1, 1, 1), (4, 1, 1, 3), (2, 1, 2, 1), (2, 2, 1, 1), (2, 2, 1, 3), (1, 2, 2, 0), (1, 1, 4, 0)}
    assert {shape.global_batch_size for shape in shapes} == {config.global_batch_size}
    assert {shape.parallelism.expert_parallel_size for shape in shapes} == {2}
    assert {(shape.parallelism.pp_layers, shape.parallelism.dp_shard) for shape in shapes} == {(None, None)}


def test_engine_context_experts_and_replicas_of_shards_are_changed_one_at_a_time() -> None:
    mixture = config_of("mixtral|dp=2 pp=2 zero=1 engine=1f1b accum=4|model.model_config.num_hidden_layers=4")
    found = {tuple(overrides[:2]) for overrides in changes(mixture, GPU)}
    engines = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
    expected = {(f"parallelism.pp_engine={engine}",) for engine in engines}
    expected |= {("optimizer.zero_stage=2",), ("parallelism.expert_parallel_size=2",)}
    assert found == expected | {("parallelism.context_parallel_size=2", "parallelism.dp=1")}
    for overrides in changes(mixture, GPU):
        assert load(mixture, overrides).global_batch_size == mixture.global_batch_size
    sharded = config_of("llama|dp=2 cp=2 zero=3")
    assert ["optimizer.zero_stage=hybrid", "parallelism.dp_shard=2"] not in list(changes(sharded, GPU))
    halved = next(each for each in changes(sharded, GPU) if "parallelism.context_parallel_size=1" in each)
    assert load(sharded, halved).parallelism.world_size == 4
    assert ["optimizer.zero_stage=hybrid", "parallelism.dp_shard=2"] in list(changes(load(sharded, halved), GPU))
