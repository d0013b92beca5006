"""The tiny Llama's first step by `transformers`, written as short as it gets: what start_up.py compares us with.

    HF_HOME=… HF_HUB_OFFLINE=1 python benchmarks/peers/first_step.py examples/config_tiny_llama-david.yaml

The dataset and the tokenizer of the config, as many documents tokenized as a batch needs, the model, fused AdamW, one
step in bf16; then its loss is printed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import yaml
from datasets import load_dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


def main() -> None:
    config = yaml.safe_load(Path(sys.argv[1]).read_text())
    data, shape, tokens = config["data_stages"][0]["data"]["dataset"], config["model"]["model_config"], config["tokens"]
    documents = load_dataset(data["hf_dataset_or_datasets"], split=data["hf_dataset_splits"])
    tokenizer = AutoTokenizer.from_pretrained(config["tokenizer"]["tokenizer_name_or_path"])
    sequences, length = tokens["micro_batch_size"], tokens["sequence_length"]
    ids: list[int] = []
    for document in documents:
        ids += tokenizer(document[data["text_column_name"]])["input_ids"]
        if len(ids) >= sequences * length:
            break
    batch = torch.tensor(ids[: sequences * length]).view(sequences, length)

    torch.manual_seed(config["general"]["seed"])
    model = LlamaForCausalLM(LlamaConfig(**{key: value for key, value in shape.items() if key != "is_llama_config"}))
    rate = config["optimizer"]["learning_rate_scheduler"]["learning_rate"]
    optimizer = torch.optim.AdamW(model.parameters(), rate, fused=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config["optimizer"]["clip_grad"])
    optimizer.step()
    print(f"step 1/1 loss {float(loss):.3f}", flush=True)


if __name__ == "__main__":
    main()
