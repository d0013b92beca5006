"""A conversation in the tokenizer's chat template; each reply continues the whole conversation so far.

    chat = Chat(*load_for_generation("checkpoints/10")[:2], system="You are brief.")
    chat.reply("What is 2 + 2?").text          # "4"
    chat.reply("And plus one?").text           # the model reads the previous turns

The template (`chat_template` of the tokenizer, in jinja) renders the turns with their markers, up to the start of the
answer; so it also tells the marker that ends an answer:

    <|im_start|>user↵What is 2 + 2?<|im_end|>↵<|im_start|>assistant↵     4     <|im_end|>
"""

from collections.abc import Callable
from dataclasses import replace

from kenotron.config.errors import InputError
from kenotron.generation.decode import DEFAULTS, Completion, generate
from kenotron.generation.model_on_ranks import ModelOnRanks
from kenotron.generation.options import SamplingOptions
from kenotron.models.decoder import Decoder
from kenotron.text.chat_template import chat_template, render_chat, special_tokens
from kenotron.text.tokenizer import TextTokenizer, library_ids

ANSWER = "An answer."


class Chat:
    """`messages` are the turns so far, as ``{role, content}``."""

    def __init__(
        self, model: Decoder | ModelOnRanks, tokenizer: TextTokenizer | None, system: str | None = None
    ) -> None:
        """Raise InputError if there is no tokenizer or chat template, or it does not support a system turn."""
        if tokenizer is None:
            raise InputError(
                "chat: the model has no tokenizer; `kenotron generate --prompt-tokens` continues token ids"
            )
        template = chat_template(tokenizer)
        if template is None:
            raise InputError(
                f"chat: the tokenizer {tokenizer.name} has no chat_template, which models for conversations have; "
                f"`kenotron generate --prompt` continues plain text"
            )
        self.model, self.tokenizer, self.template = model, tokenizer, template
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        turns = [*self.messages, {"role": "user", "content": "A question."}, {"role": "assistant", "content": ANSWER}]
        mark = self._text(turns).rpartition(ANSWER)[2].strip()  # the template's marker after an answer
        self.end_of_turn = [mark] if mark else []

    def reply(
        self, text: str, sampling: SamplingOptions = DEFAULTS, stream: Callable[[str], None] | None = None
    ) -> Completion:
        """Return the model's answer to `text`; both are added to the conversation.

        `stream` is called with the answer piece by piece.
        Raises InputError, without changing the conversation, if it is too long for the model.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = library_ids(self.tokenizer.backend, [self._text(messages, prompt=True)], special=False)
        sampling = replace(sampling, stop=[*sampling.stop, *self.end_of_turn])
        listen = None if stream is None else lambda _, piece: stream(piece)
        (answer,) = generate(self.model, self.tokenizer, prompt, sampling, stream=listen)
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer

    def _text(self, messages: list[dict[str, str]], prompt: bool = False) -> str:
        return render_chat(self.template, special_tokens(self.tokenizer), "chat", messages, prompt=prompt)[0]
