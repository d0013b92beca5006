"""Bugs of reading text and of tokenizers: documents lost, doubled or joined, and other tokens than the model knows."""

from mutants.mutant import Mutant

DOCUMENTS = "text/test_documents.py"
TOKENIZER = "text/test_tokenizer.py"
SFT = "text/test_sft.py"
TOKENIZE = "prepare/test_prepare_tokenize.py"
SPANS = f"{TOKENIZE}::test_spans_of_any_size_hold_every_document_once"

MUTANTS = [
    Mutant(
        name="a-line-at-a-ranges-start-is-lost",
        file="text/json_lines.py",
        find="        stream.seek(start - 1)\n",
        replace="        stream.seek(start)\n",
        why="where a range is cut just at a line's end, the next line is in neither range",
        tests=(SPANS,),
    ),
    Mutant(
        name="a-line-at-a-ranges-end-is-read-twice",
        file="text/json_lines.py",
        find="    while stop is None or place < stop:\n",
        replace="    while stop is None or place <= stop:\n",
        why="where a range is cut just at a line's end, the next line is in both ranges",
        tests=(SPANS,),
    ),
    Mutant(
        name="a-byte-order-mark-is-text",
        file="text/file_documents.py",
        find='io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")',
        replace='io.TextIOWrapper(stream, encoding="utf-8", newline="")',
        why="every file that Windows wrote begins with a token that stands for nothing",
        tests=(f"{DOCUMENTS}::test_a_small_file_is_one_document",),
    ),
    Mutant(
        name="files-in-the-order-of-the-disk",
        file="text/file_documents.py",
        find="for file in sorted(walk(root), key=str) if not",
        replace="for file in walk(root) if not",
        why="the same folder on another machine is another order of documents, and other held-out texts",
        tests=(f"{DOCUMENTS}::test_folders_are_read_in_a_fixed_order_without_hidden_and_foreign_files",),
    ),
    Mutant(
        name="a-truncation-kept-in-a-tokenizer-file",
        file="text/tokenizer.py",
        find="    backend.no_truncation()\n",
        replace="",
        why="of every document only the first 512 tokens are trained on, with many tokenizers of the hub",
        tests=(f"{TOKENIZER}::test_truncation_and_padding_kept_in_a_file_are_off",),
    ),
    Mutant(
        name="special-tokens-of-the-older-file-win",
        file="text/tokenizer.py",
        find='for name in ("special_tokens_map.json", "tokenizer_config.json"):',
        replace='for name in ("tokenizer_config.json", "special_tokens_map.json"):',
        why="an end of text that was changed in tokenizer_config.json is still the old one: generation never stops",
        tests=(f"{TOKENIZER}::test_special_tokens_are_found_in_either_file_and_either_form",),
    ),
    Mutant(
        name="a-vocabulary-without-its-added-tokens",
        file="text/tokenizer.py",
        find="        self.vocab_size = max(vocab.values()) + 1\n",
        replace="        self.vocab_size = backend.get_vocab_size(with_added_tokens=False)\n",
        why="ids of special tokens are outside of the model's embedding, or do not fit the type of a token file",
        tests=(f"{TOKENIZER}::test_a_special_token_that_is_in_the_text_has_bytes",),
    ),
    Mutant(
        name="an-end-of-text-after-every-chunk",
        file="text/encode.py",
        find="            if rules.eos is not None and ends[place] and not has_end:\n",
        replace="            if rules.eos is not None and not has_end:\n",
        why="a book is cut into many documents, in the middle of its sentences",
        tests=(f"{TOKENIZE}::test_a_long_document_stays_one_document_in_pieces",),
    ),
    Mutant(
        name="an-end-of-text-twice",
        file="text/encode.py",
        find="            if rules.eos is not None and ends[place] and not has_end:\n",
        replace="            if rules.eos is not None and ends[place]:\n",
        why="a tokenizer that ends texts by itself gives two ends, and the model learns to begin with one",
        tests=("data/test_token_cache.py", "text/test_sft.py", "text/test_hash_split.py"),
    ),
    Mutant(
        name="the-first-of-several-chat-templates",
        file="text/chat_template.py",
        find='for each in named}.get("default")',
        replace='for each in named}.get(str(named[0].get("name")) if named else "default")',
        why="a model of tool use is fine-tuned in the template of its tools, and chats in another one",
        tests=(f"{SFT}::test_of_several_templates_the_default_is_taken",),
    ),
    Mutant(
        name="what-is-in-an-answers-first-token-is-no-loss",
        file="text/sft.py",
        find="(reach == 0), ahead, stops)] > before[starts]\n",
        replace="(reach == 0), ahead, stops)] == before[starts] + (stops - starts)\n",
        why="a token that joins the prompt's last blank to the answer is never learnt",
        tests=(f"{SFT}::test_a_token_of_prompt_and_answer_is_in_the_loss",),
    ),
    Mutant(
        name="an-answer-to-be-left-out-is-trained-on",
        file="text/sft.py",
        find="        if kept.get(key, 1) != 1:\n",
        replace="        if False:\n",
        why="messages with weight 0, which OpenAI's format leaves out of the loss, are in it",
        tests=(SFT,),
    ),
    Mutant(
        name="a-fraction-of-a-dataset-is-all-of-it",
        file="text/hub_datasets.py",
        find="rows.select(range(int(fraction * len(rows))))",
        replace="rows.select(range(len(rows)))",
        why="a mix of 10% of one dataset and all of another is all of both",
        tests=("text/test_hub_datasets.py::test_local_folders_splits_and_fractions_give_the_rows_they_name",),
    ),
    Mutant(
        name="words-that-were-dropped-from-the-cache-are-lost",
        file="text/pretoken_cache.py",
        find="{word: met[word] for words in cut for word in words if word in met} | ids_of_new",
        replace="ids_of_new",
        why="when the cache of words is full, tokenization ends with KeyError after hours",
        tests=("text/test_pretoken_cache.py",),
    ),
]
