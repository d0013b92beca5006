"""Bugs of decoding: texts that read well, and are not what was asked for."""

from mutants.mutant import Mutant

FAMILIES = "models/test_families_equal_transformers.py"

MUTANTS = [
    Mutant(
        name="a-penalty-that-rewards-unlikely-tokens",
        file="generation/sampling.py",
        find="torch.where(logits < 0, logits * penalty, logits / penalty)",
        replace="logits / penalty",
        why="a logit below zero rises when it is divided: what was repeated and unlikely becomes likelier",
        tests=("generation/test_sampling.py",),
    ),
    Mutant(
        name="a-stop-string-over-two-tokens-missed",
        file="generation/text.py",
        find="        text = self.held + piece\n",
        replace="        text = piece\n",
        why="a stop string that comes in two pieces does not stop, and its beginning is lost",
        tests=("generation/test_text_stream.py",),
    ),
    Mutant(
        name="positions-that-count-the-padding",
        file="models/foreign.py",
        find="(mask.cumsum(-1) - 1).clamp(min=0)",
        replace="(mask.new_ones(mask.shape).cumsum(-1) - 1)",
        why="shorter prompts of a batch begin at the position of their padding's length",
        tests=("models/test_foreign_models.py::test_decoding_with_its_cache_is_generate_of_transformers",),
    ),
    Mutant(
        name="top-p-keeps-one-token-less",
        file="generation/sampling.py",
        find="        tail[:, -1] = False  # the most likely token always stays\n",
        replace="",
        why="with a small top_p no token is left, and the first of the vocabulary is drawn",
        tests=("generation/test_sampling.py::test_a_tiny_top_p_keeps_the_likeliest_token",),
    ),
    Mutant(
        name="min-p-of-all-and-not-of-the-likeliest",
        file="generation/sampling.py",
        find="        least = sampling.min_p * probabilities.amax(-1, keepdim=True)\n",
        replace="        least = sampling.min_p\n",
        why="an uncertain model has no token above min_p: nothing is left to draw from",
        tests=("generation/test_sampling.py::test_the_cuts_are_those_of_transformers_in_its_order",),
    ),
    Mutant(
        name="all-prompts-draw-the-same-numbers",
        file="generation/sampling.py",
        find='derive_key("sample", seed, request)',
        replace='derive_key("sample", seed)',
        why="a hundred samples of one prompt are a hundred times the same text: pass@100 is pass@1",
        tests=("generation/test_sampling.py::test_a_draw_depends_on_seed_request_and_position_and_on_nothing_else",),
    ),
    Mutant(
        name="a-penalty-forgets-the-prompt",
        file="generation/decode.py",
        find="texts = [row.prompt_tokens + row.tokens for row in rows] if penalized else ()",
        replace="texts = [row.tokens for row in rows] if penalized else ()",
        why="another text than transformers' for the same penalty: words of the prompt are repeated freely",
        tests=("generation/test_decoding.py::test_penalty_and_log_probabilities_are_those_of_transformers",),
    ),
    Mutant(
        name="a-text-goes-on-beyond-the-positions",
        file="generation/decode.py",
        find="min(sampling.max_new_tokens, room), sampling.max_new_tokens > room",
        replace="sampling.max_new_tokens, False",
        why="a model continues at positions that it was never trained on, and writes noise without a word",
        tests=("generation/test_decoding.py::test_a_text_stops_where_the_positions_end",),
    ),
    Mutant(
        name="ends-of-text-of-the-models-files-are-not-read",
        file="generation/decode.py",
        find='for name in ("generation_config.json", "config.json")] if folder else ():',
        replace='for name in ("generation_config.json", "config.json")] if not folder else ():',
        why="a chat model of Llama 3.2 or Qwen never stops: it plays the user's part, too",
        tests=("generation/test_decoding.py::test_each_end_of_text_that_the_models_files_name_stops",),
    ),
    Mutant(
        name="a-chat-begins-with-two-starts-of-text",
        file="generation/chat.py",
        find="[self._text(messages, prompt=True)], special=False)",
        replace="[self._text(messages, prompt=True)], special=True)",
        why="the template has written the start of the text, and the tokenizer adds another: answers get worse",
        tests=("generation/test_chat.py::test_the_model_reads_what_the_template_writes_and_no_more",),
    ),
    Mutant(
        name="a-row-that-ends-takes-its-neighbours-values",
        file="generation/kv_cache.py",
        find="        for memory in (self.keys, self.values):\n",
        replace="        for memory in (self.keys,):\n",
        why="once a prompt of a batch is done, the others attend to values of another text",
        tests=("generation/test_decoding.py::test_a_row_that_ends_leaves_the_others_as_they_were",),
    ),
    Mutant(
        name="biases-of-a-router-are-rounded",
        file="generation/load.py",
        find="        parameter.data = parameter.data.float()\n",
        replace="        pass\n",
        why="a mixture decodes in bfloat16 with other experts than it was trained to choose",
        tests=(
            "models/test_families_equal_transformers.py::test_an_export_in_bf16_and_in_several_files_keeps_the_biases_of_experts",
        ),
    ),
    Mutant(
        name="decoding-forgets-the-scale-of-a-stretched-context",
        file="generation/kv_cache.py",
        find="attn_mask=mask, scale=scale)",
        replace="attn_mask=mask)",
        why="a DeepSeek with YaRN decodes with other scores than it was trained with; quick tests sampled no such case",
        tests=(f"{FAMILIES}::test_greedy_decoding_continues_as_transformers_does[deepseek_v3_stretched]",),
    ),
]
