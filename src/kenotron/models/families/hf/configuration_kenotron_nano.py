"""Config of Kénotron's nano models for transformers (trust_remote_code): the keys of a Llama."""

from transformers.models.llama.configuration_llama import LlamaConfig


class KenotronNanoConfig(LlamaConfig):
    model_type = "kenotron_nano"

    def validate_architecture(self):
        """Heads may have any width."""
