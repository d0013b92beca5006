"""`_attn_implementation` of a run: what it logs, what it refuses, and the branch of a GPU on the CPU."""

from pathlib import Path

import pytest
import torch

from kenotron.config.errors import InputError
from kenotron.kernels.attentions import choice
from support import flash_on_cpu
from support.tiny_run import largest_difference, losses, text_overrides, tiny_config, train_and_listen, weights

MISTRAL = (
    "model.model_config={family: mistral, sliding_window: 7, hidden_size: 32, intermediate_size: 24, "
    "num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 300, eos_token_id: 0}"
)


def test_packed_documents_with_windows_train_the_same_on_a_gpus_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of torch's flash attention are played (support/flash_on_cpu.py); in fp32, to compare numbers."""
    packed = ("model.document_masking=true", "tokens.sequence_length=48")
    found = []
    for name in ("cpu", "nvidia"):
        if name == "nvidia":
            monkeypatch.setattr(choice, "HALF", ("float32",))
            monkeypatch.setattr(choice, "facts_of", lambda device: choice.DeviceFacts("nvidia", (9, 0)))
            launches = flash_on_cpu.install()
            launches.clear()
        run, said = train_and_listen(tiny_config(tmp_path / name, *text_overrides(tmp_path), MISTRAL, *packed))
        found.append((losses(run.config), weights(run)))
        chosen = "sdpa (" if name == "cpu" else "flash (_attn_implementation: flash_attention_2)"
        assert f"Attention: {chosen}" in said
    assert len(launches) == 3 * 2  # steps, layers
    assert max(launches) > 4  # documents in the 4 sequences
    (cpu_losses, cpu_weights), (gpu_losses, gpu_weights) = found
    assert gpu_losses == pytest.approx(cpu_losses, rel=2e-6)
    assert largest_difference(gpu_weights, cpu_weights) < 1e-4  # Adam's first steps are as long for small gradients


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["flash_attention_3"], "flash_attention_3 needs an NVIDIA GPU, found cpu; expected one of auto, flash_att"),
        (["flex_attention"], "flex_attention has no backward on a CPU; expected one of auto"),
        (
            ["eager", "parallelism.context_parallel_size=2"],
            "expected auto, flash_attention_2 or sdpa with parallelism.",
        ),
    ],
)
def test_what_a_run_cannot_use_is_refused(tmp_path: Path, overrides: list[str], said: str) -> None:
    name, *more = overrides
    config = tiny_config(tmp_path, f"model.model_config._attn_implementation={name}", *more)
    with pytest.raises(InputError, match="_attn_implementation") as caught:
        choice.attention_of_run(config, torch.device("cpu"))
    assert said in str(caught.value)


def test_ulysses_computes_with_the_chosen_function_and_the_others_with_their_own(tmp_path: Path) -> None:
    layout = ("parallelism.context_parallel_size=2", "model.model_config._attn_implementation=")
    cpu, chosen = torch.device("cpu"), "parallelism.context_parallel_method="
    _, ring = choice.attention_of_run(tiny_config(tmp_path, layout[0], layout[1] + "sdpa"), cpu)
    _, ulysses = choice.attention_of_run(tiny_config(tmp_path, layout[0], layout[1] + "eager", chosen + "ulysses"), cpu)
    assert (ring, ulysses) == ("ring, in blocks of its own", "eager (_attn_implementation: eager)")
    _, auto = choice.attention_of_run(tiny_config(tmp_path, layout[1] + "auto"), cpu)
    assert auto == "sdpa (_attn_implementation: auto)"
