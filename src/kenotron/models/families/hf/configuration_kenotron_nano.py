"""Config of Kénotron's nano models for transformers (trust_remote_code): the keys of a Llama, and two more."""

from transformers.models.llama.configuration_llama import LlamaConfig


class KenotronNanoConfig(LlamaConfig):
    model_type = "kenotron_nano"
    value_embeddings: bool = False
    final_logit_softcapping: float | None = None

    def validate_architecture(self):
        """Heads may have any width."""
