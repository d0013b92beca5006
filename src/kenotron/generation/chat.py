"""A conversation in the tokenizer's chat template: each turn is the whole conversation so far, continued.

    chat = Chat(*load_for_generation("checkpoints/10")[:2], system="You are brief.")
    chat.reply("What is 2 + 2?").text          # "4"
    chat.reply("And plus one?").text           # the model has read the turns before

The template (`chat_template` of the tokenizer, in jinja) writes the turns with their marks, up to where an answer is
expected; so it also says where an answer ends:

    <|im_start|>user↵What is 2 + 2?<|im_end|>↵<|im_start|>assistant↵     4     <|im_end|>
"""

from collections.abc import Callable
from dataclasses import replace

from kenotron.config.errors import InputError
from kenotron.generation.decode import DEFAULTS, Completion, generate
from kenotron.generation.options import SamplingOptions
from kenotron.generation.ranks import ModelOnRanks
from kenotron.models.decoder import Decoder
from kenotron.text.chat import chat_template, render_chat, special_tokens
from kenotron.text.tokenizer import TextTokenizer, library_ids

ANSWER = "An answer."


class Chat:
    """`messages` are the turns so far, as ``{role, content}``."""

    def __init__(
        self, model: Decoder | ModelOnRanks, tokenizer: TextTokenizer | None, system: str | None = None
    ) -> None:
        """Raises InputError if there is no tokenizer, none with a chat template, or one that takes no system turn."""
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
        mark = self._text(turns).rpartition(ANSWER)[2].strip()  # what the template writes after an answer
        self.end_of_turn = [mark] if mark else []

    def reply(
        self, text: str, sampling: SamplingOptions = DEFAULTS, stream: Callable[[str], None] | None = None
    ) -> Completion:
        """The model's answer to `text`; both are added to the conversation.

        `stream` is called with the answer piece by piece.
        Raises InputError: a conversation too long for the model; it stays as it was.
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
