"""Bugs of preparing tokens: documents lost, doubled or cut, and what was made from other input taken for done."""

from mutants.mutant import Mutant

TOKENIZE = "prepare/test_prepare_tokenize.py"
MERGE = "prepare/test_prepare_merge.py"
FINISHED = f"{TOKENIZE}::test_a_finished_folder_says_so_and_other_work_in_it_is_refused"

MUTANTS = [
    Mutant(
        name="a-changed-input-of-the-same-size-is-the-old-one",
        file="text/file_documents.py",
        find='return f"{file.absolute()} {stat.st_size} {_version(stat)}"',
        replace='return f"{file.absolute()} {stat.st_size}"',
        why="a corrected file of the same length is 'done already': training goes on with the old text",
        tests=(f"{TOKENIZE}::test_a_text_that_was_corrected_at_the_same_length_is_another_input",),
    ),
    Mutant(
        name="an-input-that-changes-meanwhile-is-not-noticed",
        file="prepare/tokenize.py",
        find="    _refuse_changed(work)\n    manifest",
        replace="    manifest",
        why="shards of two versions of a file stand side by side under one manifest",
        tests=(f"{TOKENIZE}::test_an_input_that_changes_while_it_is_read_is_refused",),
    ),
    Mutant(
        name="bos-only-where-it-is-asked-for",
        file="prepare/tokenize.py",
        find="    with_bos = by_itself if options.bos is None else options.bos\n",
        replace="    with_bos = bool(options.bos)\n",
        why="tokens of Llama's tokenizer lack the token that begins every text: another model than is prompted later",
        tests=(f"{TOKENIZE}::test_a_tokenizer_that_begins_texts_by_itself_does_so_here_unless_told_otherwise",),
    ),
    Mutant(
        name="every-shard-is-shuffled-alike",
        file="prepare/tokenize.py",
        find="        seed = [options.seed, self.shard.number]\n",
        replace="        seed = [self.shard.number]\n",
        why="the seed of a shuffle changes nothing",
        tests=(f"{TOKENIZE}::test_shuffled_documents_are_the_same_documents_in_an_order_of_the_seed",),
    ),
    Mutant(
        name="a-row-repeated-no-times-is-written-once",
        file="prepare/inputs.py",
        find="for text in texts for _ in range(count)]",
        replace="for text in texts for _ in range(max(count, 1))]",
        why="rows that a user's function weighs with 0, because they are spam, are in the corpus",
        tests=(f"{TOKENIZE}::test_functions_of_the_user_drop_rewrite_and_repeat_rows",),
    ),
    Mutant(
        name="a-tokenizer-trained-on-the-first-input-most",
        file="prepare/inputs.py",
        find="source.documents()), characters // len(texts))",
        replace="source.documents()), characters)",
        why="--max-characters is taken from each input: twice the memory, and a large file drowns the other languages",
        tests=("prepare/test_prepare_options.py::test_a_tokenizer_is_trained_on_the_same_share_of_every_input",),
    ),
    Mutant(
        name="a-share-makes-the-shards-of-its-neighbour",
        file="prepare/tokenize.py",
        find="if shard.number % count == number]",
        replace="if shard.number % (count + 1) == number]",
        why="of three machines that share the work none makes every fourth shard",
        tests=("prepare/test_prepare_shares.py::test_shares_in_any_number_and_order_are_the_same_bytes",),
    ),
    Mutant(
        name="what-a-folder-held-is-taken-for-ours",
        file="prepare/tokenize.py",
        find="    if output.is_dir() and not (output / UNFINISHED).is_dir() and any(output.iterdir()):\n",
        replace="    if False:\n",
        why="tokens are written between files of the user's, and a run reads all of them",
        tests=(FINISHED,),
    ),
    Mutant(
        name="documents-without-a-mask-have-no-loss",
        file="prepare/merge.py",
        find="np.ones(len(ids), bool) if with_loss and loss is None",
        replace="np.zeros(len(ids), bool) if with_loss and loss is None",
        why="plain text merged with prompts and answers is never learnt from",
        tests=(f"{MERGE}::test_a_loss_mask_goes_with_its_document",),
    ),
    Mutant(
        name="a-merge-narrows-the-ids",
        file="prepare/merge.py",
        find="    widest = max(file.tokens.dtype.itemsize for file in files)\n",
        replace="    widest = min(file.tokens.dtype.itemsize for file in files)\n",
        why="ids above 65,535 become others, modulo that, or a merge ends with an error after an hour",
        tests=(f"{MERGE}::test_two_widths_become_the_wider",),
    ),
    Mutant(
        name="a-bucket-of-a-shuffle-keeps-its-order",
        file="prepare/shuffle.py",
        find="            order = self.random.permutation(len(lengths))\n",
        replace="            order = np.arange(len(lengths))\n",
        why="documents of one source still follow each other, in the order of the crawl",
        tests=(f"{MERGE}::test_every_order_is_about_equally_likely",),
    ),
]
