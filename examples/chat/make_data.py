"""Conversations about the colours and places of things, and a tokenizer with a chat template for them.

python make_data.py        writes conversations/train.jsonl and tokenizer/
"""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

COLOURS = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black", "blood": "red", "sun": "yellow"}
PLACES = {"Paris": "France", "Rome": "Italy", "Oslo": "Norway", "Lima": "Peru", "Cairo": "Egypt", "Delhi": "India"}
# The loss counts what is inside {% generation %}.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def turns() -> list[tuple[str, str]]:
    """Every question with its answer."""
    colours = [(f"What colour is the {thing}?", f"The {thing} is {colour}.") for thing, colour in COLOURS.items()]
    return colours + [(f"Where is {city}?", f"{city} is in {country}.") for city, country in PLACES.items()]


def main() -> None:
    """Write both folders."""
    draw, known = random.Random(0), turns()
    lines = []
    for _ in range(400):
        messages = []
        for question, answer in draw.sample(known, draw.randint(1, 3)):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}))
    Path("conversations").mkdir(exist_ok=True)
    Path("conversations/train.jsonl").write_text("\n".join(lines) + "\n")

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(mark, special=True) for mark in marks],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for turn in known for text in turn), trainer)
    Path("tokenizer").mkdir(exist_ok=True)
    tokenizer.save("tokenizer/tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    Path("tokenizer/tokenizer_config.json").write_text(json.dumps(settings, indent=2))


if __name__ == "__main__":
    main()
