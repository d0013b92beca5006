"""The YAMLs of examples/models have as many parameters as was published, and train in miniature."""

import math
from pathlib import Path

import pytest
import yaml

from kenotron.config import load, refuse_unsupported
from kenotron.interop.sources import unpadded
from kenotron.models import named_parameters
from support.tiny_run import REPOSITORY, losses, text_overrides, train_quietly

FOLDER = REPOSITORY / "examples" / "models"
# Of an MLA block, with its norms, and of all layers: the sum of DeepSeek-V3's shapes, 671B without the layer of MTP.
MLA = 7168 * 1536 + 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 + 512 * 128 * 256 + 128 * 128 * 7168 + 2 * 7168
DEEPSEEK = 61 * MLA + 3 * 7168 * (3 * 18432 + 58 * 257 * 2048) + 58 * 256 * (7168 + 1) + 2 * 129280 * 7168 + 7168
# From the models' pages on the Hugging Face hub, for GPT-NeoX-20B from its paper. For Gaperon 1.5B and 24B the pages
# have just these digits; the numbers are sums of their shapes.
PUBLISHED = {
    "deepseek-v3": DEEPSEEK,
    "gaperon-1.5b": 16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048) + 2 * 128256 * 2048 + 2048,
    "gaperon-24b": 40 * (10 * 5120 * 1024 + 4096 + 1024 + 3 * 5120 * 32768 + 2 * 5120) + 2 * 128256 * 5120 + 5120,
    "gaperon-8b": 8_030_261_248,
    "gpt-neox-20b": 20_554_567_680,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "nemotron-h-8b": 8_100_852_736,
    "olmo2-7b": 7_298_617_344,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "smollm3-3b": 3_075_098_624,
    "starcoder2-15b": 15_957_889_024,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
}


def test_every_example_has_the_published_number_of_parameters() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(PUBLISHED)
    readme = (FOLDER / "README.md").read_text()
    for name, published in PUBLISHED.items():
        path = FOLDER / f"{name}.yaml"
        config = load(path)
        refuse_unsupported(config)
        found = sum(parameter.numel() for _, parameter in named_parameters(unpadded(config.model)))
        assert found == published, name
        assert f"{published:,}" in path.read_text().splitlines()[0], name
        assert f"[`{name}.yaml`]" in readme
        assert f"| {published:,} |" in readme


SMALL_LATENTS = yaml.safe_load("""{num_key_value_heads: 4, q_lora_rank: 32, kv_lora_rank: 24, qk_nope_head_dim: 16,
    qk_rope_head_dim: 8, v_head_dim: 16, n_routed_experts: 16, moe_intermediate_size: 32}""")


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_an_example_trains_in_miniature(name: str, tmp_path: Path) -> None:
    given = load(FOLDER / f"{name}.yaml").model.decoder
    shapes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    shapes |= {"num_key_value_heads": 4 if given.kv_heads == given.num_attention_heads else 2, "bos_token_id": 0}
    shapes |= {"head_dim": 16 if given.free_head_dim is None else 24}
    if name == "deepseek-v3":
        del shapes["head_dim"]
        shapes |= SMALL_LATENTS
    if name == "nemotron-h-8b":
        shapes |= {"hybrid_override_pattern": "M-M*", "mamba_num_heads": 8, "mamba_head_dim": 16}
    overrides = [f"model.model_config.{key}={value}" for key, value in shapes.items()]
    overrides += ["parallelism={dp: 1, tp: 1, pp: 1}", "tokens.batch_accumulation_per_replica=1"]
    overrides += ["tokens.train_steps=10", "tokens.sequence_length=32", "tokens.micro_batch_size=4"]
    overrides += [f"checkpoints.checkpoints_path={tmp_path}/checkpoints", f"logging={{log_dir: {tmp_path}/logs}}"]
    overrides += ["optimizer.learning_rate_scheduler={learning_rate: 0.01, lr_decay_style: constant}"]
    config = load(FOLDER / f"{name}.yaml", [*overrides, *text_overrides(tmp_path)])
    train_quietly(config)
    found = losses(config)
    assert len(found) == 10
    assert found[0] == pytest.approx(math.log(300), abs=0.3)
    assert found[-1] < found[0] - 0.5
